package codec

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// With momentum what is sent is the sum of all momenta, less what waits.
func TestDGCSendsTheSumOfMomenta(t *testing.T) {
	const n = 2000
	c := mustParse(t, "dgc:0.01,momentum=0.5")
	rng := rand.New(rand.NewPCG(5, 6))
	residual := make([]byte, c.ResidualBytes(n))
	v, u := make([]float32, n), make([]float32, n)
	for it := range 30 {
		x := gradient(rng, n)
		got := decoded(t, c, n, encoded(c, x, residual, Stream{Iteration: uint64(it)}))
		sent := 0
		for i := range x {
			u[i] = float32(0.5*u[i]) + x[i]
			v[i] += u[i]
			if got[i] != 0 {
				sent++
				if got[i] != v[i] {
					t.Fatalf("iteration %d: element %d was sent as %v, want %v", it, i, got[i], v[i])
				}
				u[i], v[i] = 0, 0
			}
		}
		if sent != 20 {
			t.Fatalf("iteration %d: %d elements were sent, want 20", it, sent)
		}
	}
	if !bytes.Equal(residual, append(slices.Clone(raw(v)), raw(u)...)) {
		t.Error("the residual is not v and u")
	}
}

func TestTopKIsExact(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	inputs := map[string]func(n int) []float32{
		"normal":  func(n int) []float32 { return gradient(rng, n) },
		"rising":  func(n int) []float32 { return each(n, func(i int) float32 { return float32(i) }) },
		"falling": func(n int) []float32 { return each(n, func(i int) float32 { return float32(-n + i) }) },
		"equal":   func(n int) []float32 { return each(n, func(int) float32 { return -1 }) },
		"few":     func(n int) []float32 { return each(n, func(i int) float32 { return float32(max(0, 3-i)) }) },
		"coarse":  func(n int) []float32 { return each(n, func(int) float32 { return float32(rng.IntN(5) - 2) }) },
		"periodic": func(n int) []float32 {
			return each(n, func(i int) float32 { return float32(i%4096) * float32(1+i%2) })
		},
		"special": func(n int) []float32 {
			return each(n, func(i int) float32 {
				return []float32{0, float32(math.NaN()), float32(math.Inf(-1)), 1e-45, -3}[rng.IntN(5)]
			})
		},
	}
	for name, input := range inputs {
		for _, n := range []int{1, 100, worthwhile*sampled + 1001} {
			for _, part := range []float64{1e-5, 0.01, 0.2, 0.9} {
				s := selector{}
				k := share{part: part}.at(n, 0)
				x := input(n)
				got := s.top(raw(slices.Clone(x)), nil, k)
				if want := topBySorting(x, k); !slices.Equal(got.numbers(), want) {
					t.Fatalf("%s: %d of %d: %d elements, want %d, or others", name, k, n, got.n, len(want))
				}
			}
		}
	}
}

func each(n int, f func(i int) float32) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = f(i)
	}
	return x
}

func topBySorting(x []float32, k int) []uint32 {
	order := make([]uint32, 0, len(x))
	for i, f := range x {
		if f != 0 {
			order = append(order, uint32(i))
		}
	}
	slices.SortStableFunc(order, func(a, b uint32) int {
		return int(math.Float32bits(x[b])&magnitude) - int(math.Float32bits(x[a])&magnitude)
	})
	order = order[:min(k, len(order))]
	slices.Sort(order)
	return order
}

func TestAWarmUpSendsLessAndLess(t *testing.T) {
	s := share{part: 0.001, warmUp: 100}
	last := 1 << 30
	for i := range uint64(120) {
		k := s.at(1_000_000, i)
		if k > last || k > s.most(1_000_000) {
			t.Fatalf("iteration %d sends %d, the one before %d", i, k, last)
		}
		last = k
	}
	if s.at(1_000_000, 0) != 250_000 || s.at(1_000_000, 50) != 15_812 || last != 1000 {
		t.Errorf("%d at first, %d half-way, %d at last", s.at(1_000_000, 0), s.at(1_000_000, 50), last)
	}
}
