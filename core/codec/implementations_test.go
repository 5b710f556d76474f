package codec

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// grids are those of the codecs that the tests know.
func grids(t testing.TB) map[string]*grid {
	all := map[string]*grid{}
	for _, s := range settings {
		if c, ok := mustParse(t, s).(*blockwise); ok {
			all[s] = &c.grid
		}
	}
	return all
}

// special is n elements of all sorts: of few magnitudes, of random bits, not finite.
func special(rng *rand.Rand, n int) []float32 {
	x := gradient(rng, n)
	odd := []float32{0, float32(math.Copysign(0, -1)), 1, -1, 65504, 65520, 6e-8, 1e-40, math.MaxFloat32, float32(math.Inf(-1)), float32(math.NaN())}
	for i := range x {
		switch rng.IntN(100) {
		case 0:
			x[i] = odd[rng.IntN(len(odd))]
		case 1:
			x[i] = math.Float32frombits(rng.Uint32())
		}
	}
	return x
}

// compareGrid takes x through encode and decode of e and of the reference.
func compareGrid(t *testing.T, e implementation, name string, g *grid, x, residual []float32, offset int) {
	t.Helper()
	k := keys{rand.Uint32(), rand.Uint32()}
	c := blockwise{grid: *g}
	n := len(x)
	want, got := make([]byte, c.MaxEncoded(n)), shifted(make([]byte, c.MaxEncoded(n)), offset)
	left, leftWant := shifted(raw(residual), offset), bytes.Clone(raw(residual))
	m := e.encode(g, got, shifted(raw(x), offset), left, k)
	mWant := reference{}.encode(g, want, raw(x), leftWant, k)
	if i := differ(left, leftWant); i >= 0 {
		t.Fatalf("%v %s, %d elements: element %d of the residual is %v, want %v", e, name, n, i, of[float32](left)[i], of[float32](leftWant)[i])
	}
	if !bytes.Equal(got[:m], want[:mWant]) {
		t.Fatalf("%v %s, %d elements, keys %v: the messages of %d and %d bytes differ", e, name, n, k, m, mWant)
	}
	compareDecoding(t, e, name, g, x, got[:m], offset)
}

func compareDecoding(t *testing.T, e implementation, name string, g *grid, x []float32, message []byte, offset int) {
	t.Helper()
	for _, add := range []bool{false, true} {
		got, want := shifted(raw(x), offset), bytes.Clone(raw(x))
		fault, faultWant := e.decode(g, got, message, add), reference{}.decode(g, want, message, add)
		if fault != faultWant {
			t.Fatalf("%v %s: fault %d, want %d", e, name, fault, faultWant)
		}
		if i := differ(got, want); i >= 0 {
			t.Fatalf("%v %s add %v, %d elements: element %d is %v, want %v", e, name, add, len(x), i, of[float32](got)[i], of[float32](want)[i])
		}
	}
}

// shifted is a copy of b that begins offset bytes behind an aligned address; nil stays nil.
func shifted(b []byte, offset int) []byte {
	if b == nil {
		return nil
	}
	return append(make([]byte, offset, offset+len(b)), b...)[offset:]
}

// differ is the first element in which a and b have different bits, other than those inside of a NaN; or -1.
func differ(a, b []byte) int {
	for i, f := range of[float32](a) {
		if g := of[float32](b)[i]; math.Float32bits(f) != math.Float32bits(g) && (f == f || g == g) {
			return i
		}
	}
	return -1
}

func TestKernelsEqualTheReferenceForEveryGridAndLength(t *testing.T) {
	rng := rand.New(rand.NewPCG(21, 22))
	lengths := []int{1, 7, 8, 9, 17, 63, 65, 100, 511, 513, 1023, 1025, 4097, 8200}
	for _, e := range implementations() {
		t.Run(e.String(), func(t *testing.T) {
			for name, g := range grids(t) {
				compareGrid(t, e, name, g, []float32{math.MaxFloat32, -math.MaxFloat32, 1}, nil, 0)
				for _, n := range lengths {
					compareGrid(t, e, name, g, special(rng, n), nil, 0)
					compareGrid(t, e, name, g, gradient(rng, n), gradient(rng, n), rng.IntN(64))
					compareGrid(t, e, name, g, special(rng, n), special(rng, n), 1)
				}
			}
		})
	}
}

func TestScansAndSumsEqualTheReference(t *testing.T) {
	rng := rand.New(rand.NewPCG(23, 24))
	for _, e := range implementations() {
		for _, n := range []int{1, 63, 64, 65, 2047, 2049, 10_000} {
			for _, threshold := range []uint32{0, math.Float32bits(1), math.Float32bits(9), infinite, magnitude} {
				compareScan(t, e, special(rng, n), gradient(rng, n), threshold, 64+rng.IntN(n+64))
			}
		}
	}
}

func compareScan(t *testing.T, e implementation, x, src []float32, threshold uint32, room int) {
	t.Helper()
	type outcome struct {
		stops   []int
		index   []uint32
		x, v, u []float32
		most    [2]uint32
	}
	run := func(e implementation) (o outcome) {
		o.x = slices.Clone(x)
		for from := 0; from < len(x); {
			c := new(candidates)
			c.reserve(room)
			from = e.scan(raw(o.x), raw(src), from, threshold, c)
			o.stops = append(o.stops, from)
			o.index = append(o.index, c.numbers()...)
		}
		o.most = [2]uint32{e.feed(raw(o.x), nil), e.feed(raw(o.x), raw(src))}
		o.v, o.u = slices.Clone(x), slices.Clone(o.x)
		e.momentum(raw(o.v), raw(o.u), raw(src), 0.9)
		return o
	}
	got, want := run(e), run(reference{})
	if !slices.Equal(got.stops, want.stops) || !slices.Equal(got.index, want.index) {
		t.Fatalf("%v: scan of %d elements stopped at %v with %d, want %v with %d", e, len(x), got.stops, len(got.index), want.stops, len(want.index))
	}
	if differ(raw(got.x), raw(want.x)) >= 0 || differ(raw(got.u), raw(want.u)) >= 0 || differ(raw(got.v), raw(want.v)) >= 0 {
		t.Fatalf("%v: sums of %d elements differ", e, len(x))
	}
	if got.most != want.most && got.most[1] < infinite {
		t.Fatalf("%v: greatest of %d elements %x, want %x", e, len(x), got.most, want.most)
	}
}

func FuzzKernelsEqualTheReference(f *testing.F) {
	all := grids(f)
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range all {
			if !yield(name) {
				return
			}
		}
	})
	rng := rand.New(rand.NewPCG(25, 26))
	for i := range names {
		f.Add(raw(special(rng, 70)), uint8(i), uint8(i), uint32(i)<<22)
	}
	f.Fuzz(func(t *testing.T, data []byte, which, offset uint8, threshold uint32) {
		name := names[int(which)%len(names)]
		x := append([]float32(nil), of[float32](data)...)
		for _, e := range implementations()[1:] {
			compareGrid(t, e, name, all[name], x, nil, int(offset%64))
			compareGrid(t, e, name, all[name], x, slices.Clone(x), 0)
			compareDecoding(t, e, name, all[name], x, data, int(offset%64))
			compareScan(t, e, x, x, threshold&magnitude, 64)
		}
	})
}

// FuzzMalformedMessages gives every codec bytes that nobody encoded: they are an error, and the
// destination stays as it was, or they are decoded; never more.
func FuzzMalformedMessages(f *testing.F) {
	rng := rand.New(rand.NewPCG(27, 28))
	for i, setting := range settings {
		c := mustParse(f, setting)
		n := 1 + rng.IntN(300)
		f.Add(encoded(c, gradient(rng, n), make([]byte, c.ResidualBytes(n)), Stream{}), uint8(i), uint32(n))
	}
	codecs := make([]Codec, len(settings))
	for i, setting := range settings {
		codecs[i] = mustParse(f, setting)
	}
	f.Fuzz(func(t *testing.T, message []byte, which uint8, n uint32) {
		c := codecs[int(which)%len(codecs)]
		was := gradient(rand.New(rand.NewPCG(1, 1)), int(n%70_000))
		checkMalformed(t, c, was, message)
	})
}

func checkMalformed(t *testing.T, c Codec, was []float32, message []byte) {
	t.Helper()
	for name, decode := range map[string]func(dst, message []byte) error{"Decode": c.Decode, "DecodeAdd": c.DecodeAdd} {
		dst := slices.Clone(was)
		if err := decode(raw(dst), message); err != nil && !slices.Equal(dst, was) {
			t.Errorf("%s %s: %v, and yet the destination changed", c, name, err)
		}
	}
}

func TestMessagesThatWereCutOrLengthenedAreErrors(t *testing.T) {
	rng := rand.New(rand.NewPCG(29, 30))
	for _, setting := range settings {
		c := mustParse(t, setting)
		for _, n := range []int{1, 40, 1300} {
			x := gradient(rng, n)
			m := encoded(c, x, make([]byte, c.ResidualBytes(n)), Stream{})
			for cut := range len(m) {
				if cut > 40 && cut < len(m)-40 {
					continue
				}
				err := c.Decode(raw(slices.Clone(x)), m[:cut])
				if err == nil && !strings.HasPrefix(setting, "randomk") { // whose messages of fewer elements are sound
					t.Errorf("%s: %d of %d bytes for %d elements are no error", setting, cut, len(m), n)
				}
				checkMalformed(t, c, x, m[:cut])
			}
			if err := c.Decode(raw(x), append(m, 0)); err == nil {
				t.Errorf("%s: a byte too many is no error", setting)
			} else if !strings.Contains(err.Error(), "malformed") {
				t.Error(err)
			}
		}
	}
}

func TestDamagedMessagesDoNoHarm(t *testing.T) {
	rng := rand.New(rand.NewPCG(31, 32))
	for _, setting := range settings {
		c := mustParse(t, setting)
		const n = 700
		x := gradient(rng, n)
		m := encoded(c, x, make([]byte, c.ResidualBytes(n)), Stream{})
		for range 200 {
			damaged := bytes.Clone(m)
			for range 1 + rng.IntN(3) {
				damaged[rng.IntN(min(len(m), 1<<rng.IntN(13)))] = byte(rng.Uint32())
			}
			checkMalformed(t, c, x, damaged)
		}
	}
}

// The golden block is worked out by hand. Of v = |level| + 1 = 1 2 2 1 1 3 1 1 end in the lowest bit 10011011, and
// those that go on have the bits 001 there; in the next bit all end: 111; the signs are 010. Of the bytes this is the
// lowest bit first.
func TestEliasCodesStandAsTheFormatSays(t *testing.T) {
	g := &mustParse(t, "qsgd:levels=7,block=8,coding=elias").(*blockwise).grid
	levels := []float32{0, 1, -1, 0, 0, 2, 0, 0}
	golden := []byte{0, 0, 0, 0x3f, 3, 0, 0b11011001, 0b10111100, 0} // step 0.5, 3 bytes, 17 bits
	codes := make([]uint16, len(levels))
	for i, level := range levels {
		codes[i] = uint16(7 + level)
	}
	out := make([]byte, 10)
	if m := g.writeBlock(out, codes, 0.5); !bytes.Equal(out[:m], golden) {
		t.Errorf("%v is written as % x, want % x", levels, out[:m], golden)
	}
	for _, e := range implementations() {
		got := make([]float32, len(levels))
		if f := e.decode(g, raw(got), golden, false); f != sound {
			t.Errorf("%v: fault %d", e, f)
		}
		for i, level := range levels {
			if got[i] != level/2 {
				t.Errorf("%v: element %d is %v, want %v", e, i, got[i], level/2)
			}
		}
		for wrong, message := range map[string][]byte{
			"a bit behind the last": {0, 0, 0, 0x3f, 3, 0, 0b11011001, 0b10111100, 0b10},
			"a byte too few":        {0, 0, 0, 0x3f, 2, 0, 0b11011001, 0b10111100},
			"a byte too many":       {0, 0, 0, 0x3f, 3, 0, 0xff, 0, 0},
			"no end":                {0, 0, 0, 0x3f, 3, 0, 0, 0, 0},
		} {
			if f := e.decode(g, make([]byte, 4*len(levels)), message, false); f != badCode {
				t.Errorf("%v: %s is fault %d, want %d", e, wrong, f, badCode)
			}
		}
	}
}

// QSGD, section 3.1: a code takes the bits of Elias' for |level| + 1 and one for the sign of a level that is not 0.
func TestEliasCodesAreAsLongAsElias(t *testing.T) {
	rng := rand.New(rand.NewPCG(35, 36))
	for name, g := range grids(t) {
		if !g.elias {
			continue
		}
		for range 200 {
			codes := make([]uint16, 1+rng.IntN(g.block))
			length := (8 - len(codes)%8) % 8 // zeros fill the last byte of a plane
			for i := range codes {
				level := min(int(rng.ExpFloat64()), g.levels)
				codes[i] = uint16(g.levels + level*(1-2*rng.IntN(2)))
				length += 2*bits.Len(uint(level+1)) - 1 + min(level, 1)
			}
			want := (length + 7) / 8
			if want >= g.packedBytes(len(codes)) {
				want = 0 // bit planes instead
			}
			out := make([]byte, 6+g.packedBytes(len(codes)))
			g.writeBlock(out, codes, 1)
			if got := int(binary.LittleEndian.Uint16(out[4:])); got != want {
				t.Fatalf("%s: %d codes take %d bytes, want %d", name, len(codes), got, want)
			}
		}
	}
}

func TestLevelsBeyondTheGridAreErrors(t *testing.T) {
	for _, levels := range []int{1, 4, 6, 7, 100, 1000} {
		for _, coding := range []string{"packed", "elias"} {
			g := &mustParse(t, fmt.Sprintf("qsgd:levels=%d,block=64,coding=%s", levels, coding)).(*blockwise).grid
			writer := *g
			writer.levels = 1<<(g.bits-1) - 1 // the most that planes have room for
			if g.elias {
				writer.levels, writer.bits = 2*levels+1, g.bits+1
			}
			for code := range 2*writer.levels + 1 {
				level := code - writer.levels
				beyond := level > levels || level < -levels
				codes := slices.Repeat([]uint16{uint16(writer.levels)}, 64)
				codes[code%64] = uint16(code)
				if !g.elias {
					beyond = code > 2*levels
					codes = slices.Repeat([]uint16{uint16(code)}, 64)
				}
				out := make([]byte, 6+writer.packedBytes(64))
				m := writer.writeBlock(out, codes, 1)
				want := map[bool]fault{false: sound, true: badCode}[beyond]
				for _, e := range implementations() {
					if f := e.decode(g, make([]byte, 4*64), out[:m], false); f != want {
						t.Errorf("%v, %s: level %d of %d is fault %d, want %d", e, coding, level, levels, f, want)
					}
				}
			}
		}
	}
}

// The shares of memcpy are what core/codec is judged by: a copy of the same 64 MiB runs right before each.
func BenchmarkShareOfMemcpy(b *testing.B) {
	rng := rand.New(rand.NewPCG(33, 34))
	const n = 16 << 20
	x, dst := make([]float32, n), make([]byte, 4*n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	for _, setting := range []string{
		"none", "fp16", "bf16", "int8", "int8:feedback=on", "int4", "onebit", "qsgd", "qsgd:coding=elias", "terngrad", "natural",
		"topk:0.01", "topk:0.001", "randomk:0.01", "threshold:2.6", "dgc:0.001", "int4+s2",
	} {
		c := mustParse(b, setting)
		buf, residual := make([]byte, c.MaxEncoded(n)), make([]byte, c.ResidualBytes(n))
		m := c.Encode(buf, raw(x), residual, Stream{})
		for name, step := range map[string]func(i int){
			"encode":    func(i int) { c.Encode(buf, raw(x), residual, Stream{Iteration: uint64(i)}) },
			"decode":    func(int) { _ = c.Decode(dst, buf[:m]) },
			"decodeadd": func(int) { _ = c.DecodeAdd(dst, buf[:m]) },
		} {
			if name != "encode" {
				clear(residual)
				m = c.Encode(buf, raw(x), residual, Stream{})
			}
			b.Run(fmt.Sprintf("%s/%s", setting, name), func(b *testing.B) {
				b.SetBytes(4 * n)
				copying, coding := math.Inf(1), math.Inf(1) // the least: other work of the machine only adds
				for i := 0; b.Loop(); i++ {
					copying = min(copying, seconds(func() { copy(dst, raw(x)) }))
					coding = min(coding, seconds(func() { step(i) }))
				}
				b.ReportMetric(copying/coding, "of-memcpy")
			})
		}
	}
}
func seconds(f func()) float64 {
	began := time.Now()
	f()
	return time.Since(began).Seconds()
}
