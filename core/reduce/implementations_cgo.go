//go:build cgo

package reduce

// #cgo CFLAGS: -std=c11 -O3 -Wall -Wextra
// #cgo noescape reduce_load
// #cgo nocallback reduce_load
// #cgo noescape reduce_add
// #cgo nocallback reduce_add
// #cgo noescape reduce_load2
// #cgo nocallback reduce_load2
// #cgo noescape reduce_store
// #cgo nocallback reduce_store
// #cgo noescape reduce_adasum
// #cgo nocallback reduce_adasum
// #include "reduce.h"
import "C"

import (
	"unsafe"

	"golang.org/x/sys/cpu"

	"github.com/paceline/paceline/internal/units"
)

// kernels is the C kernels for one instruction set.
type kernels struct {
	level C.int
	name  string
}

// implementations lists the implementations that this machine can run, the fastest last.
func implementations() []implementation {
	all := []implementation{reference{}, kernels{C.REDUCE_LEVEL_PLAIN, "plain"}}
	if cpu.X86.HasAVX2 && C.reduce_has_f16c() != 0 {
		all = append(all, kernels{C.REDUCE_LEVEL_AVX2, "avx2"})
		if cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512DQ && cpu.X86.HasAVX512VL {
			all = append(all, kernels{C.REDUCE_LEVEL_AVX512, "avx512"})
		}
	}
	return all
}

func (k kernels) String() string { return k.name }

func (k kernels) load(d units.DType, acc, src []byte, prescale float64) {
	t, half := typesOf(d)
	C.reduce_load(k.level, t, half, pointer(acc), pointer(src), count(d, src), C.double(prescale))
}

func (k kernels) add(op units.ReduceOp, d units.DType, acc, src []byte, prescale float64) {
	t, half := typesOf(d)
	C.reduce_add(k.level, operator(op), t, half, pointer(acc), pointer(src), count(d, src), C.double(prescale))
}

func (k kernels) load2(op units.ReduceOp, d units.DType, acc, a, b []byte, prescale float64) {
	t, half := typesOf(d)
	C.reduce_load2(k.level, operator(op), t, half, pointer(acc), pointer(a), pointer(b), count(d, a), C.double(prescale))
}

func (k kernels) store(d units.DType, dst, acc []byte, mul, div float64) {
	t, half := typesOf(d)
	C.reduce_store(k.level, t, half, pointer(dst), pointer(acc), count(d, dst), C.double(mul), C.double(div))
}

func (k kernels) blend(acc units.DType, a, b []byte) {
	t, _ := typesOf(acc)
	C.reduce_adasum(k.level, t, pointer(a), pointer(b), count(acc, a))
}

func pointer(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

func count(d units.DType, tensor []byte) C.size_t { return C.size_t(len(tensor) / d.Size()) }

// typesOf gives C's numbers for the accumulator type and for the 16-bit type that is widened to it.
func typesOf(d units.DType) (t, half C.int) {
	switch d {
	case units.Uint8:
		return C.REDUCE_U8, C.REDUCE_HALF_NONE
	case units.Int8:
		return C.REDUCE_I8, C.REDUCE_HALF_NONE
	case units.Int16:
		return C.REDUCE_I16, C.REDUCE_HALF_NONE
	case units.Int32:
		return C.REDUCE_I32, C.REDUCE_HALF_NONE
	case units.Int64:
		return C.REDUCE_I64, C.REDUCE_HALF_NONE
	case units.Float16:
		return C.REDUCE_F32, C.REDUCE_HALF_FLOAT16
	case units.BFloat16:
		return C.REDUCE_F32, C.REDUCE_HALF_BFLOAT16
	case units.Float32:
		return C.REDUCE_F32, C.REDUCE_HALF_NONE
	case units.Float64:
		return C.REDUCE_F64, C.REDUCE_HALF_NONE
	}
	panic("reduce: no kernel for " + d.String())
}

func operator(op units.ReduceOp) C.int {
	switch op {
	case units.Average, units.Sum:
		return C.REDUCE_OP_SUM
	case units.Min:
		return C.REDUCE_OP_MIN
	case units.Max:
		return C.REDUCE_OP_MAX
	case units.Product:
		return C.REDUCE_OP_PRODUCT
	}
	panic("reduce: no kernel for " + op.String())
}
