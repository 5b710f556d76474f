package reduce

import (
	"math"

	"github.com/paceline/paceline/internal/units"
)

// Widen turns a floating-point tensor into float32: exactly where it has 16 bits, rounded where it has 64.
func Widen(d units.DType, dst, src []byte) {
	if d != units.Float64 {
		Load(d, dst, src, 1)
		return
	}
	checkPair(dst, src)
	to := of[float32](dst)
	for i, x := range of[float64](src) {
		to[i] = float32(x)
	}
}

// Narrow turns float32 into a floating-point tensor, rounding to the nearest where that has 16 bits.
func Narrow(d units.DType, dst, src []byte) {
	switch d {
	case units.Float64:
		checkPair(src, dst)
		to := of[float64](dst)
		for i, x := range of[float32](src) {
			to[i] = float64(x)
		}
	case units.Float32:
		copy(dst, src)
	default:
		Store(d, dst, src, 1, 1)
	}
}

// AddFloat32 adds scale·src, of float32, to an accumulator of a floating-point type.
func AddFloat32(d units.DType, acc, src []byte, scale float64) {
	if AccType(d) == units.Float32 {
		Add(units.Sum, units.Float32, acc, src, scale)
		return
	}
	checkPair(src, acc)
	to := of[float64](acc)
	for i, x := range of[float32](src) {
		to[i] += float64(scale * float64(x)) // never fused, as in the reference
	}
}

// StoreFloat32 sets dst, of float32, to scale·acc.
func StoreFloat32(d units.DType, dst, acc []byte, scale float64) {
	if AccType(d) == units.Float32 {
		Store(units.Float32, dst, acc, scale, 1)
		return
	}
	checkPair(dst, acc)
	to := of[float32](dst)
	for i, x := range of[float64](acc) {
		to[i] = float32(scale * x)
	}
}

// Norm is the L2 norm of float32 elements, summed in float64.
func Norm(src []byte) float64 {
	var sum [4]float64 // independent partial sums
	x := of[float32](src)
	for ; len(x) >= 4; x = x[4:] {
		for i := range sum {
			sum[i] += float64(x[i]) * float64(x[i])
		}
	}
	for _, x := range x {
		sum[0] += float64(x) * float64(x)
	}
	return math.Sqrt(sum[0] + sum[1] + sum[2] + sum[3])
}

// checkPair panics where the lengths are not those of equally many float32 and float64: a bug, which would corrupt memory.
func checkPair(narrow, wide []byte) {
	if len(narrow)%4 != 0 || 2*len(narrow) != len(wide) {
		panic("reduce: lengths of float32 and float64 do not fit")
	}
}
