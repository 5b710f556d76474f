package reduce_test

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/units"
)

// Every floating-point type comes back from float32 as it was, where float32 holds it, and sums in its own type.
func TestFloatsGoThroughFloat32AndBack(t *testing.T) {
	values := []float64{0, 1, -2.5, 0.125, 1024}
	for _, d := range []units.DType{units.Float16, units.BFloat16, units.Float32, units.Float64} {
		wide := make([]byte, 4*len(values))
		for i, v := range values {
			binary.NativeEndian.PutUint32(wide[4*i:], math.Float32bits(float32(v)))
		}
		tensor := make([]byte, d.Size()*len(values))
		reduce.Narrow(d, tensor, wide)
		again := make([]byte, len(wide))
		reduce.Widen(d, again, tensor)
		acc := make([]byte, reduce.AccBytes(d, len(tensor)))
		reduce.Load(d, acc, tensor, 1)
		reduce.AddFloat32(d, acc, wide, 0.5)
		sum := make([]byte, len(wide))
		reduce.StoreFloat32(d, sum, acc, 2)
		for i, v := range values {
			if got := math.Float32frombits(binary.NativeEndian.Uint32(again[4*i:])); float64(got) != v {
				t.Errorf("%v: %g came back as %g", d, v, got)
			}
			if got := math.Float32frombits(binary.NativeEndian.Uint32(sum[4*i:])); float64(got) != 3*v {
				t.Errorf("%v: twice one and a half times %g is %g", d, v, got)
			}
		}
	}
}

// A product is rounded before it is added, also by processors that have an instruction for both at once.
func TestFloat64SumsAreTheSameOnEveryProcessor(t *testing.T) {
	acc, src := make([]byte, 8), make([]byte, 4)
	binary.NativeEndian.PutUint64(acc, math.Float64bits(-1))
	binary.NativeEndian.PutUint32(src, math.Float32bits(3))
	reduce.AddFloat32(units.Float64, acc, src, 1./3)
	if got := math.Float64frombits(binary.NativeEndian.Uint64(acc)); got != 0 {
		t.Errorf("-1 and a third of 3 is %g", got)
	}
}
