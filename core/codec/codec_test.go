package codec

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// settings are what the tests take through everything: each codec, and each of its ways.
var settings = []string{
	"none", "fp16", "fp16:feedback=on", "bf16", "bf16:feedback=on",
	"int8", "int8:block=8", "int8:block=256,feedback=on", "int4", "int4:feedback=on",
	"onebit", "onebit:block=64", "onebit:feedback=off",
	"qsgd", "qsgd:levels=1", "qsgd:levels=5,block=100", "qsgd:levels=127", "qsgd:levels=1000,feedback=on",
	"qsgd:levels=32767,block=8192", "qsgd:coding=elias", "qsgd:levels=255,block=37,coding=elias,feedback=on", "qsgd:levels=32767,coding=elias",
	"qsgd:levels=1,block=64,coding=elias", "qsgd:levels=100,block=100,coding=elias",
	"terngrad", "terngrad:clip=0", "terngrad:clip=1,block=256,feedback=on",
	"natural", "natural:levels=1", "natural:levels=127", "natural:levels=3,feedback=on",
	"topk:0.01", "topk:0.3", "topk:1", "topk:count=10", "topk:0.05,warmup=10", "topk:0.1,feedback=off",
	"randomk:0.01", "randomk:0.1,feedback=off", "randomk:count=7", "randomk:1",
	"threshold:1", "threshold:0.001", "threshold:2,feedback=off",
	"dgc:0.01", "dgc:0.01,momentum=0,warmup=5", "dgc:count=3",
	"none+s2", "none+zstd", "int4+s2", "onebit+zstd", "topk:0.01+s2", "terngrad+zstd", "qsgd:levels=1+s2",
}

// sizes are the lengths of tensors, around those of blocks; the great ones are for the sparse codecs'.
var (
	sizes       = []int{0, 1, 2, 7, 8, 9, 63, 64, 65, 99, 511, 512, 513, 1023, 1024, 1025, 4095, 4097}
	sparseSizes = []int{sparseBlock - 1, sparseBlock, sparseBlock + 1, 2*sparseBlock + 3}
)

func mustParse(t testing.TB, setting string) Codec {
	t.Helper()
	c, err := Parse(setting)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// gradient is n elements whose spread changes along the tensor.
func gradient(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64() * math.Exp(2*math.Sin(float64(i)/500)))
	}
	return x
}

// encoded is a message; no byte beyond its bound was written.
func encoded(c Codec, x []float32, residual []byte, s Stream) []byte {
	most := c.MaxEncoded(len(x))
	guard := bytes.Repeat([]byte{0xa5}, 64)
	buf := append(make([]byte, most, most+len(guard)), guard...)
	m := c.Encode(buf[:most:most], raw(x), residual, s)
	if m > most || !bytes.Equal(buf[most:], guard) {
		panic(fmt.Sprintf("%s: %d elements take %d bytes, or touch more, than the bound of %d", c, len(x), m, most))
	}
	return buf[:m:m]
}

func decoded(t testing.TB, c Codec, n int, message []byte) []float32 {
	t.Helper()
	v := make([]float32, n)
	for i := range v {
		v[i] = 12345 // what was there does not matter
	}
	if err := c.Decode(raw(v), message); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestEveryCodecKeepsItsPromisesAtEverySize(t *testing.T) {
	for _, setting := range settings {
		t.Run(setting, func(t *testing.T) {
			c := mustParse(t, setting)
			rng := rand.New(rand.NewPCG(1, 2))
			lengths := sizes
			if _, dense := c.(*blockwise); !dense {
				lengths = append(slices.Clone(sizes), sparseSizes...)
			}
			for _, n := range lengths {
				x := gradient(rng, n)
				given := slices.Clone(x)
				residual := make([]byte, c.ResidualBytes(n))
				s := Stream{Seed: 7, Iteration: 3}
				m := encoded(c, x, residual, s)
				if !bytes.Equal(raw(x), raw(given)) {
					t.Fatalf("%d elements: the gradient was changed", n)
				}
				v := decoded(t, c, n, m)
				checkAdds(t, c, x, v, m)
				if !strings.HasPrefix(setting, "dgc") && len(residual) > 0 {
					checkConserves(t, c, x, v, of[float32](residual))
				}
				again := make([]byte, c.ResidualBytes(n))
				if !bytes.Equal(m, encoded(c, x, again, s)) || !bytes.Equal(residual, again) {
					t.Fatalf("%d elements: the same stream gives another message", n)
				}
			}
		})
	}
}

// checkAdds wants DecodeAdd to add what Decode gives.
func checkAdds(t *testing.T, c Codec, acc, v []float32, message []byte) {
	t.Helper()
	sum := slices.Clone(acc)
	if err := c.DecodeAdd(raw(sum), message); err != nil {
		t.Fatal(err)
	}
	for i := range sum {
		if want := acc[i] + v[i]; sum[i] != want {
			t.Fatalf("%d elements: element %d is %v after adding %v to %v", len(acc), i, sum[i], v[i], acc[i])
		}
	}
}

// checkConserves wants what was sent and what is left to be what was given, to one rounding.
func checkConserves(t *testing.T, c Codec, given, sent, left []float32) {
	t.Helper()
	for i, x := range given {
		off := math.Abs(float64(sent[i]) + float64(left[i]) - float64(x))
		if off > 0x1p-24*math.Abs(float64(left[i])) {
			t.Fatalf("%d elements: element %d was %v, sent %v, left %v", len(given), i, x, sent[i], left[i])
		}
	}
}

// What is sent over many iterations, and the last residual, is what was given: error feedback, section 2.
func TestWhatWasSentAndTheResidualAreWhatWasGiven(t *testing.T) {
	const n, iterations = 3001, 40
	for _, setting := range settings {
		c := mustParse(t, setting)
		if c.ResidualBytes(n) == 0 || strings.HasPrefix(setting, "dgc") {
			continue
		}
		t.Run(setting, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 4))
			residual := make([]byte, c.ResidualBytes(n))
			given, sent := make([]float64, n), make([]float64, n)
			for it := range iterations {
				x := gradient(rng, n)
				v := decoded(t, c, n, encoded(c, x, residual, Stream{Iteration: uint64(it)}))
				for i := range x {
					given[i] += float64(x[i])
					sent[i] += float64(v[i])
				}
			}
			for i, left := range of[float32](residual) {
				// The sum of each iteration and each residual are rounded, at magnitudes up to about 100.
				if off := given[i] - sent[i] - float64(left); math.Abs(off) > iterations*100*0x1p-23 {
					t.Fatalf("element %d: given %v, sent %v, left %v", i, given[i], sent[i], left)
				}
			}
		})
	}
}

// The mean of messages is within a bound that follows from their observed variance and their greatest
// deviation (the empirical Bernstein bound of Maurer and Pontil), for all elements together with a
// confidence of 99.99 %. So is the sum over all elements, which finds a bias that they share.
func TestUnbiasedCodecsAreRightInTheMean(t *testing.T) {
	const n, messages, confidence = 600, 2000, 0.9999
	rng := rand.New(rand.NewPCG(9, 10))
	x := gradient(rng, n)
	for _, setting := range settings {
		c := mustParse(t, setting)
		if !c.Unbiased() || c.ResidualBytes(n) > 0 || strings.HasPrefix(setting, "none") {
			continue
		}
		t.Run(setting, func(t *testing.T) {
			off := make([]moments, n+1) // the last one is of the sum
			for m := range messages {
				s := Stream{Seed: 11, Worker: uint32(m % 7), Iteration: uint64(m / 7), Key: 5}
				sum := 0.0
				for i, f := range decoded(t, c, n, encoded(c, x, nil, s)) {
					d := float64(f) - float64(x[i])
					sum += d
					off[i].add(d)
				}
				off[n].add(sum)
			}
			step := 0.0
			for _, o := range off[:n] {
				step = max(step, o.most)
			}
			logarithm := math.Log(2 * (n + 1) / (1 - confidence))
			for i, o := range off {
				mean, variance, most := o.sum/messages, o.squares/messages, step
				if i == n {
					most = o.most
				}
				if bound := math.Sqrt(2*variance*logarithm/messages) + 7*most*logarithm/3/(messages-1) + 1e-6; math.Abs(mean) > bound {
					t.Errorf("element %d is off by %v in the mean, at most %v is chance", i, mean, bound)
				}
			}
		})
	}
}

// Clipping bounds outliers: elements that are alike have none, whatever their values.
func TestBlocksOfElementsThatAreAlikeAreNotClipped(t *testing.T) {
	rng := rand.New(rand.NewPCG(18, 19))
	for _, setting := range []string{"terngrad", "terngrad:clip=1,block=256"} {
		c := mustParse(t, setting)
		for range 200 {
			x := make([]float32, 1+rng.IntN(4096))
			value, spread := rng.Float32(), float32(rng.IntN(2))*1e-4
			given, sent := 0.0, 0.0
			for i := range x {
				x[i] = value * (1 + spread*rng.Float32())
				given += float64(x[i])
			}
			for _, f := range decoded(t, c, len(x), encoded(c, x, nil, Stream{})) {
				sent += float64(f)
			}
			if math.Abs(sent-given) > 1e-3*given {
				t.Fatalf("%s: of %d elements from %v on, whose sum is %v, %v arrived", setting, len(x), value, given, sent)
			}
		}
	}
}

type moments struct{ sum, squares, most float64 }

func (m *moments) add(d float64) {
	m.sum += d
	m.squares += d * d
	m.most = max(m.most, math.Abs(d))
}

func TestStreamsThatDifferInAnyFieldAreIndependent(t *testing.T) {
	const n = 1 << 16
	base := Stream{1, 2, 3, 4}
	u := func(s Stream, shift int) []float64 {
		k := s.keys()
		d := make([]float64, n)
		for i := range d {
			d[i] = float64(unit(k.draw(uint32(i+shift)))) - 0.5
		}
		return d
	}
	first := u(base, 0)
	for name, other := range map[string][]float64{
		"seed": u(Stream{2, 2, 3, 4}, 0), "worker": u(Stream{1, 3, 3, 4}, 0), "iteration": u(Stream{1, 2, 4, 4}, 0),
		"key": u(Stream{1, 2, 3, 5}, 0), "next element": u(base, 1), "a row": u(base, 1024),
	} {
		mean, product := 0.0, 0.0
		for i := range first {
			mean += other[i]
			product += first[i] * other[i]
		}
		// Variances of a uniform number and of a product of two: 1/12 and 1/144; 5 standard deviations.
		if math.Abs(mean)/math.Sqrt(n/12.0) > 5 || math.Abs(product)/math.Sqrt(n/144.0) > 5 {
			t.Errorf("%s: mean %v, correlation %v", name, mean/n, product/n*12)
		}
	}
}

func TestWhatIsNotFiniteArrives(t *testing.T) {
	const n = 3000
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	for _, setting := range settings {
		c := mustParse(t, setting)
		for _, bad := range []float32{nan, inf, -inf} {
			x := gradient(rand.New(rand.NewPCG(12, 13)), n)
			x[1234] = bad
			residual := make([]byte, c.ResidualBytes(n))
			v := decoded(t, c, n, encoded(c, x, residual, Stream{}))
			if f := v[1234]; f == f && f != bad {
				t.Errorf("%s: %v arrived as %v", setting, bad, f)
			}
			for i, left := range of[float32](residual) {
				if left-left != 0 {
					t.Errorf("%s: %v left %v in element %d of the residual", setting, bad, left, i)
				}
			}
		}
	}
}

// With a GradScaler whole gradients are infinite now and then: it drops that step, and goes on with a smaller scale.
func TestOneBadStepDoesNotSpoilTheFollowingOnes(t *testing.T) {
	const n = 3000
	for _, setting := range settings {
		c := mustParse(t, setting)
		for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1))} {
			x := gradient(rand.New(rand.NewPCG(12, 13)), n)
			whole := slices.Clone(x)
			for i := range whole[:n-1] {
				whole[i] = bad
			}
			residual := make([]byte, c.ResidualBytes(n))
			finite := func(f float32) bool { return f-f == 0 }
			if v := decoded(t, c, n, encoded(c, whole, residual, Stream{})); !slices.ContainsFunc(v, func(f float32) bool { return !finite(f) }) {
				t.Errorf("%s: nothing says that the gradient was %v", setting, bad)
			}
			for i, f := range decoded(t, c, n, encoded(c, x, residual, Stream{Iteration: 1})) {
				if !finite(f) {
					t.Errorf("%s: element %d is %v a step after %v", setting, i, f, bad)
					break
				}
			}
		}
	}
}

func TestExtremeMagnitudesNeitherOverflowNorTurnAround(t *testing.T) {
	for _, setting := range settings {
		c := mustParse(t, setting)
		above := strings.HasPrefix(setting, "natural") || strings.HasPrefix(setting, "randomk") // what they send of the greatest elements is greater
		if c.ResidualBytes(8) > 0 || !c.Unbiased() {
			continue
		}
		for _, x := range [][]float32{
			{1e-45, -1e-45, 0, 1e-38}, {1e-30, 2e-30, -3e-31}, {1e30, -1, 1e-30}, {1e38, -1e38, 5}, {math.MaxFloat32, 1, -1},
			{math.MaxFloat32, -math.MaxFloat32, math.MaxFloat32, 3e38},
		} {
			if above && x[0] > 0x1p127 {
				continue
			}
			for i, f := range decoded(t, c, len(x), encoded(c, x, nil, Stream{})) {
				if f-f != 0 || f < 0 && x[i] >= 0 || f > 0 && x[i] <= 0 {
					t.Errorf("%s: %v of %v arrived as %v", setting, x[i], x, f)
				}
			}
		}
	}
}

func TestALosslessStageTurnsItselfOffWhereItDoesNotPay(t *testing.T) {
	rng := rand.New(rand.NewPCG(14, 15))
	const n = 50_000
	noise, zeros := gradient(rng, n), make([]float32, n)
	for _, stage := range stages {
		c := mustParse(t, "none+"+stage)
		if m := encoded(c, noise, nil, Stream{}); len(m) != 1+4*n {
			t.Errorf("%s: noise takes %d bytes, want %d", stage, len(m), 1+4*n)
		}
		if m := encoded(c, zeros, nil, Stream{}); len(m) > n/100 {
			t.Errorf("%s: zeros take %d bytes", stage, len(m))
		}
	}
}

func TestCodecsDoNotAllocateOnceTheyAreWarm(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 17))
	const n = worthwhile * sampled // top-k takes a sample
	x := gradient(rng, n)
	for _, setting := range settings {
		c := mustParse(t, setting)
		buf, dst := make([]byte, c.MaxEncoded(n)), make([]byte, 4*n)
		residual := make([]byte, c.ResidualBytes(n))
		exchange := func() {
			m := c.Encode(buf, raw(x), residual, Stream{})
			if c.Decode(dst, buf[:m]) != nil || c.DecodeAdd(dst, buf[:m]) != nil {
				t.Error("not decoded")
			}
		}
		for range 4 * runtime.GOMAXPROCS(0) { // zstd keeps that many encoders and takes any
			exchange()
		}
		if allocations := testing.AllocsPerRun(10, exchange); allocations >= 1 && !raceEnabled {
			t.Errorf("%s: %v allocations", setting, allocations)
		}
	}
}

func TestWrongLengthsPanicBeforeMemoryIsTouched(t *testing.T) {
	c := mustParse(t, "onebit")
	for name, call := range map[string]func(){
		"room":     func() { c.Encode(make([]byte, 3), make([]byte, 40), make([]byte, 40), Stream{}) },
		"residual": func() { c.Encode(make([]byte, 300), make([]byte, 40), make([]byte, 36), Stream{}) },
		"tensor":   func() { c.Encode(make([]byte, 300), make([]byte, 41), nil, Stream{}) },
		"decode":   func() { _ = c.Decode(make([]byte, 5), nil) },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			call()
		})
	}
}

func Example() {
	c, err := Parse("topk:0.3")
	if err != nil {
		panic(err)
	}
	gradient := []float32{1, -5, 2, 4, -3, 0}
	residual := make([]byte, c.ResidualBytes(6))
	buf := make([]byte, c.MaxEncoded(6))
	m := c.Encode(buf, raw(gradient), residual, Stream{})
	sum := make([]float32, 6)
	if err := c.DecodeAdd(raw(sum), buf[:m]); err != nil {
		panic(err)
	}
	fmt.Println(c, sum, of[float32](residual))
	// Output: topk:0.3 [0 -5 0 4 0 0] [1 0 2 0 -3 0]
}
