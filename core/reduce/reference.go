package reduce

import (
	"cmp"
	"math"
	"unsafe"

	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/units"
)

// reference defines the result of every kernel in plain Go, and runs where there is no C compiler. Products
// in sums are converted to their own type explicitly, which forbids the compiler to fuse them.
type reference struct{}

func (reference) String() string { return "reference" }

func (reference) load(d units.DType, acc, src []byte, prescale float64) {
	switch d {
	case units.Float16:
		convert(of[float32](acc), of[uint16](src), half.FromFloat16)
	case units.BFloat16:
		convert(of[float32](acc), of[uint16](src), half.FromBFloat16)
	default:
		copy(acc, src)
	}
	if prescale != 1 {
		scale(AccType(d), acc, acc, prescale, 1)
	}
}

func (r reference) add(op units.ReduceOp, d units.DType, acc, src []byte, prescale float64) {
	if AccType(d) != d || prescale != 1 {
		loaded := make([]byte, len(acc))
		r.load(d, loaded, src, prescale)
		src = loaded
	}
	combine(op, AccType(d), acc, acc, src)
}

func (r reference) load2(op units.ReduceOp, d units.DType, acc, a, b []byte, prescale float64) {
	if AccType(d) == d && prescale == 1 {
		combine(op, d, acc, a, b)
		return
	}
	left := make([]byte, len(acc))
	r.load(d, left, a, prescale)
	r.add(op, d, left, b, prescale)
	copy(acc, left)
}

func (reference) store(d units.DType, dst, acc []byte, mul, div float64) {
	t := AccType(d)
	if mul != 1 || div != 1 {
		scaled := dst
		if t != d {
			scaled = make([]byte, len(acc))
		}
		scale(t, scaled, acc, mul, div)
		acc = scaled
	}
	switch d {
	case units.Float16:
		convert(of[uint16](dst), of[float32](acc), half.ToFloat16)
	case units.BFloat16:
		convert(of[uint16](dst), of[float32](acc), half.ToBFloat16)
	default:
		copy(dst, acc) // no effect if src is dst
	}
}

func (reference) blend(acc units.DType, a, b []byte) {
	if acc == units.Float64 {
		blend(of[float64](a), of[float64](b))
	} else {
		blend(of[float32](a), of[float32](b))
	}
}

// of views bytes as elements. Every supported platform permits unaligned numbers.
func of[T any](b []byte) []T {
	if len(b) == 0 {
		return nil
	}
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}

type integer interface {
	uint8 | int8 | int16 | int32 | int64
}

type float interface{ float32 | float64 }

type number interface{ integer | float }

func combine(op units.ReduceOp, t units.DType, dst, a, b []byte) {
	switch t {
	case units.Uint8:
		combineAs[uint8](op, dst, a, b)
	case units.Int8:
		combineAs[int8](op, dst, a, b)
	case units.Int16:
		combineAs[int16](op, dst, a, b)
	case units.Int32:
		combineAs[int32](op, dst, a, b)
	case units.Int64:
		combineAs[int64](op, dst, a, b)
	case units.Float32:
		combineAs[float32](op, dst, a, b)
	case units.Float64:
		combineAs[float64](op, dst, a, b)
	default:
		panic("reduce: no kernel for " + t.String())
	}
}

func combineAs[T number](op units.ReduceOp, dst, left, right []byte) {
	d, x, y := of[T](dst), of[T](left), of[T](right)
	switch op {
	case units.Average, units.Sum:
		for i, b := range y {
			d[i] = x[i] + b
		}
	case units.Product:
		for i, b := range y {
			d[i] = x[i] * b
		}
	case units.Min:
		for i, b := range y {
			d[i] = lesser(x[i], b)
		}
	case units.Max:
		for i, b := range y {
			d[i] = greater(x[i], b)
		}
	default:
		panic("reduce: no kernel for " + op.String())
	}
}

// lesser and greater return the NaN if there is one, and of two zeros the second.
func lesser[T cmp.Ordered](a, b T) T {
	if a < b || a != a {
		return a
	}
	return b
}

func greater[T cmp.Ordered](a, b T) T {
	if a > b || a != a {
		return a
	}
	return b
}

func scale(t units.DType, dst, src []byte, mul, div float64) {
	switch t {
	case units.Uint8:
		scaleInteger[uint8](dst, src, mul, div, 0, math.MaxUint8)
	case units.Int8:
		scaleInteger[int8](dst, src, mul, div, math.MinInt8, math.MaxInt8)
	case units.Int16:
		scaleInteger[int16](dst, src, mul, div, math.MinInt16, math.MaxInt16)
	case units.Int32:
		scaleInteger[int32](dst, src, mul, div, math.MinInt32, math.MaxInt32)
	case units.Int64:
		scaleInteger[int64](dst, src, mul, div, math.MinInt64, math.MaxInt64)
	case units.Float32:
		scaleFloat[float32](dst, src, mul, div)
	case units.Float64:
		scaleFloat[float64](dst, src, mul, div)
	default:
		panic("reduce: no kernel for " + t.String())
	}
}

func scaleInteger[T integer](dst, src []byte, mul, div float64, low, high T) {
	d, x := of[T](dst), of[T](src)
	for i := range d {
		switch v := float64(x[i]) * mul / div; {
		case v != v:
			d[i] = 0
		case v <= float64(low):
			d[i] = low
		case v >= float64(high):
			d[i] = high
		default:
			d[i] = T(v)
		}
	}
}

func scaleFloat[T float](dst, src []byte, mul, div float64) {
	d, x := of[T](dst), of[T](src)
	m, q := T(mul), T(div)
	for i := range d {
		d[i] = T(x[i]*m) / q
	}
}

func blend[T float](a, b []T) {
	var aa, bb, ab [8]float64 // one partial sum per index modulo 8
	for i := range a {
		x, y := float64(a[i]), float64(b[i])
		aa[i%8] += float64(x * x)
		bb[i%8] += float64(y * y)
		ab[i%8] += float64(x * y)
	}
	var normA, normB, dot float64
	for k := range 8 {
		normA += aa[k]
		normB += bb[k]
		dot += ab[k]
	}
	ca, cb := 1.0, 1.0
	if normA != 0 {
		ca = 1 - dot/(2*normA)
	}
	if normB != 0 {
		cb = 1 - dot/(2*normB)
	}
	for i := range a {
		a[i] = T(float64(ca*float64(a[i])) + float64(cb*float64(b[i])))
	}
}
