package reduce

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/units"
)

// BenchmarkKernels measures every implementation, element type and kernel on one core. It goes by the 256 KiB that a server adds at
// a time, over a tensor of one such chunk, which stays in the core's cache, and over one of 64 MiB, which does not. A rate counts
// all bytes that are read and written, as does that of a copy, to which of-memcpy compares it. Each result is compared with the
// reference's.
func BenchmarkKernels(b *testing.B) {
	for _, at := range []struct {
		name  string
		bytes int
	}{{"cache", chunkBytes}, {"memory", 64 << 20}} {
		memcpy := 0.0
		from, to := make([]byte, at.bytes), make([]byte, at.bytes)
		b.Run(at.name+"/memcpy", func(b *testing.B) {
			memcpy = rate(b, 2*at.bytes, func() {
				for i := 0; i < at.bytes; i += chunkBytes {
					copy(to[i:i+chunkBytes], from[i:i+chunkBytes])
				}
			})
		})
		for _, d := range reducible() {
			t := newTensors(d, at.bytes)
			for _, k := range timed() {
				t.want = nil
				for _, e := range implementations() {
					b.Run(fmt.Sprintf("%s/%v/%s/%v", at.name, d, k.name, e), func(b *testing.B) {
						b.ReportMetric(rate(b, k.moved(t), func() { t.each(e, &k) })/memcpy, "of-memcpy")
						t.check(b, e, &k)
					})
				}
			}
		}
	}
}

const chunkBytes = 256 << 10

// rate reports and returns bytes a nanosecond.
func rate(b *testing.B, bytes int, step func()) float64 {
	step() // the memory is there
	b.SetBytes(int64(bytes))
	for b.Loop() {
		step()
	}
	return float64(bytes) * float64(b.N) / float64(b.Elapsed())
}

// tensors is what a kernel works on: two contributions, their accumulator and the result.
type tensors struct {
	d              units.DType
	x, y, acc, dst []byte
	want           []byte
}

func newTensors(d units.DType, n int) *tensors {
	rng := rand.New(rand.NewPCG(7, 8))
	return &tensors{d: d, x: simple(rng, d, n), y: simple(rng, d, n), acc: make([]byte, AccBytes(d, n)), dst: make([]byte, n)}
}

// kernel is one call of an implementation, and how often it reads or writes a tensor and an accumulator.
type kernel struct {
	name          string
	tensors, accs int
	run           func(e implementation, t tensors)
}

func (k *kernel) moved(t *tensors) int { return k.tensors*len(t.x) + k.accs*len(t.acc) }

func timed() (all []kernel) {
	for _, op := range combining[1:] {
		all = append(all, kernel{op.String(), 1, 2, func(e implementation, t tensors) { e.add(op, t.d, t.acc, t.x, 1) }})
	}
	return append(all,
		kernel{"scaled-add", 1, 2, func(e implementation, t tensors) { e.add(units.Sum, t.d, t.acc, t.x, 0.3) }},
		kernel{"load2", 2, 1, func(e implementation, t tensors) { e.load2(units.Sum, t.d, t.acc, t.x, t.y, 1) }},
		kernel{"load", 1, 1, func(e implementation, t tensors) { e.load(t.d, t.acc, t.x, 1) }},
		kernel{"scaled-load", 1, 1, func(e implementation, t tensors) { e.load(t.d, t.acc, t.x, 0.3) }},
		kernel{"store", 1, 1, func(e implementation, t tensors) { e.store(t.d, t.dst, t.acc, 1, 1) }},
		kernel{"average", 1, 1, func(e implementation, t tensors) { e.store(t.d, t.dst, t.acc, 1, 3) }},
	)
}

// each runs a kernel on each chunk.
func (t *tensors) each(e implementation, k *kernel) {
	wide := AccBytes(t.d, chunkBytes)
	for i := range len(t.x) / chunkBytes {
		piece := func(b []byte, n int) []byte { return b[i*n : (i+1)*n] }
		k.run(e, tensors{d: t.d, x: piece(t.x, chunkBytes), y: piece(t.y, chunkBytes), acc: piece(t.acc, wide), dst: piece(t.dst, chunkBytes)})
	}
}

// check compares what a run leaves with what the reference leaves.
func (t *tensors) check(b *testing.B, e implementation, k *kernel) {
	leaves := func(e implementation) []byte {
		best.load(t.d, t.acc, t.y, 1)
		t.each(e, k)
		return append(bytes.Clone(t.acc), t.dst...)
	}
	if t.want == nil {
		t.want = leaves(reference{})
	}
	if !bytes.Equal(leaves(e), t.want) {
		b.Error("the result is not the reference's")
	}
}

// simple is a tensor of numbers between 1 and 2, which neither overflow nor cancel, where they are floats.
func simple(rng *rand.Rand, d units.DType, n int) []byte {
	b := make([]byte, n)
	period := make([]byte, 4093*d.Size())
	for i := range 4093 {
		f := 1 + rng.Float64()
		switch at := period[i*d.Size():]; d {
		case units.Float16:
			of[uint16](at)[0] = half.ToFloat16(float32(f))
		case units.BFloat16:
			of[uint16](at)[0] = half.ToBFloat16(float32(f))
		case units.Float32:
			of[float32](at)[0] = float32(f)
		case units.Float64:
			of[float64](at)[0] = f
		default:
			at[0] = byte(rng.Uint32())
		}
	}
	for at := 0; at < n; at += copy(b[at:], period) {
	}
	return b
}
