package reduce

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/units"
)

var combining = []units.ReduceOp{units.Average, units.Sum, units.Min, units.Max, units.Product}

// reducible lists the element types that can be reduced.
func reducible() (all []units.DType) {
	for _, d := range units.DTypes() {
		if Supported(units.Sum, d) == nil {
			all = append(all, d)
		}
	}
	return all
}

// input is what one run feeds to every kernel.
type input struct {
	op                 units.ReduceOp
	d                  units.DType
	a, b               []byte
	prescale, mul, div float64
}

// run takes a, then b, through every kernel of e, and returns what each left in memory.
func (c input) run(e implementation, offset int) map[string][]byte {
	acc := func() []byte { return shifted(make([]byte, AccBytes(c.d, len(c.a))), offset) }
	a, b := shifted(c.a, offset), shifted(c.b, offset)
	loaded, added, both, stored := acc(), acc(), acc(), shifted(make([]byte, len(a)), offset)
	e.load(c.d, loaded, a, c.prescale)
	copy(added, loaded)
	e.add(c.op, c.d, added, b, c.prescale)
	e.load2(c.op, c.d, both, a, b, c.prescale)
	e.store(c.d, stored, added, c.mul, c.div)
	out := map[string][]byte{"load": loaded, "add": added, "load2": both, "store": stored}
	if c.d.Float() {
		blended := bytes.Clone(loaded)
		e.blend(AccType(c.d), blended, added)
		out["blend"] = blended
	}
	return out
}

// compare fails the test where e differs from the reference.
func (c input) compare(t *testing.T, e implementation, offset int) {
	t.Helper()
	want := c.run(reference{}, 0)
	for kernel, got := range c.run(e, offset) {
		d := AccType(c.d)
		if kernel == "store" {
			d = c.d
		}
		if i := differ(d, got, want[kernel]); i >= 0 {
			s := d.Size()
			t.Fatalf("%v %s %v %v, prescale %v mul %v div %v, %d bytes at offset %d: element %d is % x, want % x",
				e, kernel, c.op, c.d, c.prescale, c.mul, c.div, len(c.a), offset, i, got[i*s:(i+1)*s], want[kernel][i*s:(i+1)*s])
		}
	}
	if !bytes.Equal(c.run(e, offset)["add"], c.run(e, offset)["load2"]) {
		t.Fatalf("%v %v %v: load and add differ from load2", e, c.op, c.d)
	}
}

func TestKernelsEqualTheReferenceForEveryTypeOpAndLength(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	lengths := []int{0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1023, 1024, 1025, 2500}
	scales := [][3]float64{{1, 1, 1}, {0.5, 1, 3}, {1 / 3., 0.1, 1}, {1, 2.5, 7}, {1, 1, 8}, {1, 3, 4}}
	for _, e := range implementations() {
		t.Run(e.String(), func(t *testing.T) {
			for _, d := range reducible() {
				for _, op := range combining {
					for _, n := range lengths {
						s := scales[rng.IntN(len(scales))]
						c := input{op, d, elements(rng, d, n), elements(rng, d, n), s[0], s[1], s[2]}
						c.compare(t, e, 0)
						c.compare(t, e, 1)
					}
				}
			}
		})
	}
}

func FuzzKernelsEqualTheReference(f *testing.F) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, d := range units.DTypes() {
		f.Add(elements(rng, d, 40), uint8(d), uint8(rng.IntN(8)), uint8(1), 0.5, 1.0, 3.0)
	}
	f.Fuzz(func(t *testing.T, data []byte, dtype, op, offset uint8, prescale, mul, div float64) {
		d := reducible()[int(dtype)%len(reducible())]
		half := len(data) / 2 / d.Size() * d.Size()
		c := input{combining[int(op)%len(combining)], d, data[:half], data[half : 2*half], prescale, mul, div}
		for _, e := range implementations() {
			c.compare(t, e, int(offset%64))
		}
	})
}

// An integer's average is the quotient, truncated, although most implementations multiply by a reciprocal.
func TestAveragesOfIntegersAreQuotients(t *testing.T) {
	divisors := []int64{1, 2, 3, 5, 7, 11, 48, 49, 100, 127, 128, 255, 256, 1000, 4093, 32767, 65535, 1 << 24, 1<<30 - 1, 1 << 30}
	for _, d := range []units.DType{units.Uint8, units.Int8, units.Int16, units.Int32} {
		for _, q := range divisors {
			values := make([]int64, 0, 1<<16)
			for i := int64(0); i < 1<<16; i++ {
				v := i // all values of 8 and 16 bits
				if d == units.Int32 {
					v = (i-1<<15)*(math.MaxInt32/(1<<15)/q)*q + i%3 - 1 // multiples of q and their neighbours
				}
				values = append(values, v)
			}
			src := integers(d, values)
			got, want := make([]byte, len(src)), make([]byte, len(src))
			reference{}.store(d, want, src, 1, float64(q))
			for _, e := range implementations() {
				e.store(d, got, src, 1, float64(q))
				if i := differ(d, got, want); i >= 0 {
					t.Fatalf("%v %v: element %d divided by %d is % x, want % x", e, d, i, q, got[i*d.Size():][:d.Size()], want[i*d.Size():][:d.Size()])
				}
			}
		}
	}
}

func integers(d units.DType, values []int64) []byte {
	b := make([]byte, len(values)*d.Size())
	for i, v := range values {
		var bits [8]byte
		binary.LittleEndian.PutUint64(bits[:], uint64(v))
		copy(b[i*d.Size():(i+1)*d.Size()], bits[:])
	}
	return b
}

// Every 16-bit number, and what lies at and around the middle between each two, is converted as by the reference.
func TestEverySixteenBitFloatIsConvertedAsByTheReference(t *testing.T) {
	for _, d := range []units.DType{units.Float16, units.BFloat16} {
		all := make([]uint16, 1<<16)
		for i := range all {
			all[i] = uint16(i)
		}
		src := unsafe.Slice((*byte)(unsafe.Pointer(&all[0])), 2<<16)
		wide, want := make([]byte, 4<<16), make([]byte, 4<<16)
		reference{}.load(d, want, src, 1)
		narrow, nearest := make([]byte, 2<<16), make([]byte, 2<<16)
		for _, e := range implementations() {
			e.load(d, wide, src, 1)
			if i := differ(units.Float32, wide, want); i >= 0 {
				t.Fatalf("%v %v: %#x becomes % x, want % x", e, d, i, wide[4*i:4*i+4], want[4*i:4*i+4])
			}
			for _, beyond := range []uint32{0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001} { // of both types' last place
				between := bytes.Clone(want)
				for i := range of[uint32](between) {
					of[uint32](between)[i] += beyond
				}
				reference{}.store(d, nearest, between, 1, 1)
				e.store(d, narrow, between, 1, 1)
				if i := differ(d, narrow, nearest); i >= 0 {
					t.Fatalf("%v %v: %#x becomes % x, want % x", e, d, of[uint32](between)[i], narrow[2*i:2*i+2], nearest[2*i:2*i+2])
				}
			}
		}
	}
}

// The destination may be one of the sources where the types are equal.
func TestDestinationMayBeASource(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, e := range implementations() {
		for _, d := range reducible() {
			if AccType(d) != d {
				continue
			}
			for _, scale := range []float64{1, 0.25} {
				a, b := elements(rng, d, 1500), elements(rng, d, 1500)
				c := input{units.Sum, d, a, b, scale, scale, 3}
				want := c.run(reference{}, 0)
				for name, into := range map[string]func([]byte, []byte) []byte{
					"load":         func(a, _ []byte) []byte { e.load(d, a, a, scale); return a },
					"load2 into a": func(a, b []byte) []byte { e.load2(units.Sum, d, a, a, b, scale); return a },
					"load2 into b": func(a, b []byte) []byte { e.load2(units.Sum, d, b, a, b, scale); return b },
					"store": func(a, b []byte) []byte {
						e.load2(units.Sum, d, a, a, b, scale)
						e.store(d, a, a, scale, 3)
						return a
					},
				} {
					kernel, _, _ := bytes.Cut([]byte(name), []byte(" "))
					got := into(bytes.Clone(a), bytes.Clone(b))
					if i := differ(d, got, want[string(kernel)]); i >= 0 {
						t.Errorf("%v %v %s scale %v: element %d differs", e, d, name, scale, i)
					}
				}
			}
		}
	}
}

// A 16-bit result may replace the first half of its accumulator.
func TestStoreNarrowsInPlace(t *testing.T) {
	rng := rand.New(rand.NewPCG(19, 20))
	for _, e := range implementations() {
		for _, d := range []units.DType{units.Float16, units.BFloat16} {
			for _, div := range []float64{1, 3} {
				acc := elements(rng, units.Float32, 5001)
				want := make([]byte, 5001*2)
				reference{}.store(d, want, acc, 1, div)
				got := acc[:len(want)]
				e.store(d, got, acc, 1, div)
				if i := differ(d, got, want); i >= 0 {
					t.Errorf("%v %v divided by %v: element %d differs", e, d, div, i)
				}
			}
		}
	}
}

// elements makes n elements: numbers of all sizes, and of floats also the special ones.
func elements(rng *rand.Rand, d units.DType, n int) []byte {
	b := make([]byte, n*d.Size())
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	special := []float32{0, float32(math.Copysign(0, -1)), 1, -1, 65504, 65519.99, 65520, 6e-8, 2.9e-8, 1e-40, math.MaxFloat32,
		float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}
	for i := range n {
		f := special[rng.IntN(len(special))]
		if rng.IntN(2) == 0 {
			f = float32(rng.NormFloat64())
		}
		if rng.IntN(4) == 0 {
			continue // random bits
		}
		switch d {
		case units.Float16:
			of[uint16](b)[i] = half.ToFloat16(f)
		case units.BFloat16:
			of[uint16](b)[i] = half.ToBFloat16(f)
		case units.Float32:
			of[float32](b)[i] = f
		case units.Float64:
			of[float64](b)[i] = float64(f) * 1.0000000001
		}
	}
	return b
}

// shifted is a copy of b that begins offset bytes behind an aligned address.
func shifted(b []byte, offset int) []byte {
	return append(make([]byte, offset, offset+len(b)), b...)[offset:]
}

// differ is the first element in which a and b have different bits, other than those inside of a NaN; or -1.
func differ(d units.DType, a, b []byte) int {
	s := d.Size()
	for i := range len(b) / s {
		x, y := a[i*s:(i+1)*s], b[i*s:(i+1)*s]
		if !bytes.Equal(x, y) && !(isNaN(d, x) && isNaN(d, y)) {
			return i
		}
	}
	return -1
}

func isNaN(d units.DType, b []byte) bool {
	v := value(d, b)
	return v != v
}

// value reads one element of a floating-point type, 0 for others.
func value(d units.DType, b []byte) float64 {
	switch d {
	case units.Float16:
		return float64(half.FromFloat16(of[uint16](b)[0]))
	case units.BFloat16:
		return float64(half.FromBFloat16(of[uint16](b)[0]))
	case units.Float32:
		return float64(of[float32](b)[0])
	case units.Float64:
		return of[float64](b)[0]
	}
	return 0
}
