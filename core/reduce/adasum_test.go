package reduce

import (
	"bytes"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/paceline/paceline/internal/units"
)

func floats(v ...float64) []byte {
	b := make([]byte, 8*len(v))
	copy(of[float64](b), v)
	return b
}

func adasumOf(contributions ...[]byte) []float64 {
	dst := make([]byte, len(contributions[0]))
	Adasum(units.Float64, dst, contributions)
	return of[float64](dst)
}

func TestAdasumAddsOrthogonalAndAveragesEqualGradients(t *testing.T) {
	if got := adasumOf(floats(3, 0), floats(0, 4)); got[0] != 3 || got[1] != 4 {
		t.Errorf("orthogonal: %v", got)
	}
	if got := adasumOf(floats(3, 4), floats(3, 4)); got[0] != 3 || got[1] != 4 {
		t.Errorf("equal: %v", got)
	}
	if got := adasumOf(floats(3, 4), floats(6, 8)); got[0] != 4.5 || got[1] != 6 {
		t.Errorf("parallel: %v", got) // 1-2/2 = 0 of a and 1-(1/2)/2 = 3/4 of b
	}
}

func TestAdasumLeavesTheOtherWhereOneIsZero(t *testing.T) {
	if got := adasumOf(floats(0, 0), floats(1, 2)); got[0] != 1 || got[1] != 2 {
		t.Errorf("zero first: %v", got)
	}
	if got := adasumOf(floats(1e-200, 0), floats(0, 0)); got[0] != 1e-200 || got[1] != 0 {
		t.Errorf("zero second: %v", got)
	}
	if got := adasumOf(floats(5, 6)); got[0] != 5 || got[1] != 6 {
		t.Errorf("alone: %v", got)
	}
	Adasum(units.Float32, nil, [][]byte{nil, nil}) // an empty tensor
}

// The tree combines neighbours first; what lies beyond a power of two folds in before.
func TestAdasumCombinesInAFixedTree(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	c := make([][]byte, 8)
	for i := range c {
		c[i] = floats(rng.NormFloat64(), rng.NormFloat64(), rng.NormFloat64())
	}
	pair := func(a, b []float64) []float64 { return adasumOf(floats(a...), floats(b...)) }
	v := func(i int) []float64 { return of[float64](c[i]) }
	for n, want := range map[int][]float64{
		2: pair(v(0), v(1)),
		3: pair(pair(v(0), v(2)), v(1)),
		4: pair(pair(v(0), v(1)), pair(v(2), v(3))),
		6: pair(pair(pair(v(0), v(4)), pair(v(1), v(5))), pair(v(2), v(3))),
		8: pair(pair(pair(v(0), v(1)), pair(v(2), v(3))), pair(pair(v(4), v(5)), pair(v(6), v(7)))),
	} {
		got := adasumOf(c[:n]...)
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("%d contributions: %v, want %v", n, got, want)
			}
		}
	}
}

func TestAdasumFollowsTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 16))
	a, b := make([]float64, 1001), make([]float64, 1001)
	var aa, bb, ab float64
	for i := range a {
		a[i], b[i] = rng.NormFloat64(), rng.NormFloat64()+0.3
		aa, bb, ab = aa+a[i]*a[i], bb+b[i]*b[i], ab+a[i]*b[i]
	}
	for i, got := range adasumOf(floats(a...), floats(b...)) {
		if want := (1-ab/(2*aa))*a[i] + (1-ab/(2*bb))*b[i]; math.Abs(got-want) > 1e-12 {
			t.Fatalf("element %d: %v, want %v", i, got, want)
		}
	}
}

func TestAdasumIsAlikeInEveryImplementationAndKeepsItsInputs(t *testing.T) {
	rng := rand.New(rand.NewPCG(17, 18))
	for _, d := range []units.DType{units.Float16, units.BFloat16, units.Float32, units.Float64} {
		for _, n := range []int{1, 2, 5, 7} {
			c, kept := make([][]byte, n), make([][]byte, n)
			for i := range c {
				c[i] = make([]byte, 333*d.Size())
				wide := make([]float32, 333)
				for k := range wide {
					wide[k] = float32(rng.NormFloat64())
				}
				fill(d, c[i], wide)
				kept[i] = bytes.Clone(c[i])
			}
			want := make([]byte, AccBytes(d, len(c[0])))
			adasum(reference{}, d, want, c)
			for _, e := range implementations() {
				got := make([]byte, len(want))
				adasum(e, d, got, c)
				if !bytes.Equal(got, want) {
					t.Errorf("%v %v of %d: differs from the reference", e, d, n)
				}
			}
			for i := range c {
				if !bytes.Equal(c[i], kept[i]) {
					t.Errorf("%v: contribution %d was changed", d, i)
				}
			}
		}
	}
}

func fill(d units.DType, dst []byte, values []float32) {
	if d == units.Float64 {
		for i, v := range values {
			of[float64](dst)[i] = float64(v) * 1.1
		}
		return
	}
	reference{}.store(d, dst, raw32(values), 1, 1)
}

func raw32(values []float32) []byte {
	b := make([]byte, 4*len(values))
	copy(of[float32](b), values)
	return b
}
