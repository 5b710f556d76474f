package reduce

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/units"
)

// reduceAll takes contributions of one type through the exported functions.
func reduceAll(t *testing.T, op units.ReduceOp, d units.DType, prescale, mul, div float64, contributions ...[]byte) []byte {
	t.Helper()
	acc := make([]byte, AccBytes(d, len(contributions[0])))
	dst := make([]byte, len(contributions[0]))
	Load(d, acc, contributions[0], prescale)
	for _, c := range contributions[1:] {
		Add(op, d, acc, c, prescale)
	}
	Store(d, dst, acc, mul, div)
	return dst
}

func raw(t *testing.T, values any) []byte {
	t.Helper()
	b, err := binary.Append(nil, binary.NativeEndian, values)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestIntegersWrapAroundInSumsAndProducts(t *testing.T) {
	for _, c := range []struct {
		op         units.ReduceOp
		d          units.DType
		a, b, want any
	}{
		{units.Sum, units.Uint8, []uint8{255, 100}, []uint8{1, 100}, []uint8{0, 200}},
		{units.Sum, units.Int8, []int8{127, -128}, []int8{1, -1}, []int8{-128, 127}},
		{units.Sum, units.Int16, []int16{math.MaxInt16}, []int16{1}, []int16{math.MinInt16}},
		{units.Sum, units.Int32, []int32{math.MaxInt32}, []int32{1}, []int32{math.MinInt32}},
		{units.Sum, units.Int64, []int64{math.MaxInt64}, []int64{1}, []int64{math.MinInt64}},
		{units.Product, units.Int16, []int16{-300}, []int16{300}, []int16{-24464}},
		{units.Product, units.Int64, []int64{math.MaxInt64}, []int64{2}, []int64{-2}},
		{units.Min, units.Int8, []int8{-3, 5}, []int8{2, 4}, []int8{-3, 4}},
		{units.Max, units.Uint8, []uint8{200, 5}, []uint8{100, 6}, []uint8{200, 6}},
	} {
		got := reduceAll(t, c.op, c.d, 1, 1, 1, raw(t, c.a), raw(t, c.b))
		if string(got) != string(raw(t, c.want)) {
			t.Errorf("%v of %v: %v and %v give % x, want %v", c.op, c.d, c.a, c.b, got, c.want)
		}
	}
}

// As Horovod scales integers: through double, cut towards zero. Beyond the range the nearest value stands.
func TestScaledIntegersAreCutTowardsZeroAndStayInRange(t *testing.T) {
	average := reduceAll(t, units.Average, units.Int32, 1, 1, 2, raw(t, []int32{3, -3, 7}), raw(t, []int32{4, -4, 8}))
	if want := raw(t, []int32{3, -3, 7}); string(average) != string(want) {
		t.Errorf("average % x, want % x", average, want)
	}
	big := reduceAll(t, units.Sum, units.Int8, 1, 100, 1, raw(t, []int8{2, -2, 1}))
	if want := raw(t, []int8{127, -128, 100}); string(big) != string(want) {
		t.Errorf("scaled % x, want % x", big, want)
	}
	pre := reduceAll(t, units.Sum, units.Int64, 0.5, 1, 1, raw(t, []int64{5, -5}), raw(t, []int64{5, -5}))
	if want := raw(t, []int64{4, -4}); string(pre) != string(want) {
		t.Errorf("prescaled % x, want % x", pre, want)
	}
	nan := reduceAll(t, units.Sum, units.Int64, 1, math.NaN(), 1, raw(t, []int64{5}))
	if want := raw(t, []int64{0}); string(nan) != string(want) {
		t.Errorf("scaled by NaN % x, want 0", nan)
	}
}

func TestAverageOfEqualValuesIsThatValue(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	for _, d := range []units.DType{units.Float16, units.BFloat16, units.Float32, units.Float64, units.Int64} {
		v := make([]byte, 100*d.Size())
		for i := range 100 {
			x := math.Trunc(rng.NormFloat64()*1000) / 4
			switch d {
			case units.Float16:
				of[uint16](v)[i] = half.ToFloat16(float32(x))
			case units.BFloat16:
				of[uint16](v)[i] = half.ToBFloat16(float32(x))
			case units.Float32:
				of[float32](v)[i] = float32(x)
			case units.Float64:
				of[float64](v)[i] = x
			case units.Int64:
				of[int64](v)[i] = int64(x)
			}
		}
		for _, n := range []int{2, 3, 7, 49} {
			all := make([][]byte, n)
			for r := range all {
				all[r] = v
			}
			if got := reduceAll(t, units.Average, d, 1, 1, float64(n), all...); string(got) != string(v) {
				t.Errorf("%v: the average of %d equal tensors is another tensor", d, n)
			}
		}
	}
}

func TestMinAndMaxGiveNaNWhereEitherSideIs(t *testing.T) {
	nan := float32(math.NaN())
	for _, e := range implementations() {
		for _, op := range []units.ReduceOp{units.Min, units.Max} {
			acc, src := raw(t, []float32{nan, 1, 2, nan}), raw(t, []float32{1, nan, 2, nan})
			e.add(op, units.Float32, acc, src, 1)
			if f := of[float32](acc); f[0] == f[0] || f[1] == f[1] || f[2] != 2 || f[3] == f[3] {
				t.Errorf("%v %v: %v", e, op, f)
			}
		}
	}
}

// Sixteen-bit sums are rounded once: 2048 + 1 + 1 is 2050 in float16, though 2048 + 1 is 2048.
func TestSixteenBitTypesAccumulateInFloat32(t *testing.T) {
	big, one, want := half.ToFloat16(2048), half.ToFloat16(1), half.ToFloat16(2050)
	got := reduceAll(t, units.Sum, units.Float16, 1, 1, 1, raw(t, big), raw(t, one), raw(t, one))
	if of[uint16](got)[0] != want {
		t.Errorf("got %v", half.FromFloat16(of[uint16](got)[0]))
	}
	if AccType(units.BFloat16) != units.Float32 || AccBytes(units.BFloat16, 6) != 12 || AccBytes(units.Int16, 6) != 6 {
		t.Error("accumulator sizes")
	}
}

func TestSupportedNamesWhatCannotBeReduced(t *testing.T) {
	for _, c := range []struct {
		op   units.ReduceOp
		d    units.DType
		want string
	}{
		{units.Sum, units.Bool, "bool tensors cannot be reduced by Sum"},
		{units.Adasum, units.Int32, "int32 tensors cannot be reduced by Adasum"},
		{units.ReduceOp(99), units.Int32, "not known"},
		{units.Sum, units.DType(99), "not known"},
		{units.Adasum, units.BFloat16, ""},
		{units.Product, units.Uint8, ""},
	} {
		err := Supported(c.op, c.d)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v of %v: %v, want %q", c.op, c.d, err, c.want)
		}
	}
}

func TestWrongLengthsPanicBeforeMemoryIsTouched(t *testing.T) {
	for name, call := range map[string]func(){
		"short accumulator": func() { Load(units.Float16, make([]byte, 4), make([]byte, 4), 1) },
		"half an element":   func() { Add(units.Sum, units.Int32, make([]byte, 5), make([]byte, 5), 1) },
		"second source":     func() { Load2(units.Sum, units.Int8, make([]byte, 5), make([]byte, 5), make([]byte, 4), 1) },
		"short destination": func() { Store(units.Int8, make([]byte, 4), make([]byte, 5), 1, 1) },
		"adasum":            func() { Adasum(units.Float32, make([]byte, 4), [][]byte{make([]byte, 8)}) },
		"adasum of ints":    func() { Adasum(units.Int32, make([]byte, 4), [][]byte{make([]byte, 4)}) },
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
