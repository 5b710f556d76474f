// Package reduce combines tensors element by element: it sums what workers push and turns the sum
// into the result. Memory is raw bytes in the machine's byte order, as received; it may be
// unaligned.
//
// A reduction of n contributions is one Load (or one Load2 for the first two), an Add for each of the
// others, and one Store:
//
//	acc = prescale·a;  acc = acc op prescale·b;  …;  dst = acc·mul/div
//
// 16-bit floats accumulate in float32 and are rounded once, to the nearest with ties to even, by
// Store. Everything else accumulates in its own type. Average is Sum with a divisor in Store.
//
// The result does not depend on the machine: reference.go defines it. The C kernels, chosen by the processor's
// features at the program's start, give the same bits for every length and alignment (only the bits of a NaN
// may differ). In particular:
//
//   - Integers wrap around in sums and products. Scaling them uses float64, truncates towards zero and
//     saturates, as Horovod does where that is defined.
//   - Floats are scaled in the accumulator's type: x*mul is rounded, then truly divided by div, so
//     that the average of equal values is that value.
//   - Min and Max give NaN where either side is NaN, and of two zeros that of the later contribution.
package reduce

import (
	"fmt"

	"github.com/paceline/paceline/internal/units"
)

// AccType is the type in which contributions of type d accumulate.
func AccType(d units.DType) units.DType {
	if d == units.Float16 || d == units.BFloat16 {
		return units.Float32
	}
	return d
}

// AccBytes is the length of the accumulator for n bytes of a tensor of type d.
func AccBytes(d units.DType, n int) int { return n / d.Size() * AccType(d).Size() }

// Supported reports why tensors of type d cannot be reduced by op, nil if they can.
func Supported(op units.ReduceOp, d units.DType) error {
	switch {
	case !op.Valid() || !d.Valid():
		return fmt.Errorf("%v of %v is not known here", op, d)
	case d == units.Bool:
		return fmt.Errorf("bool tensors cannot be reduced by %v: convert them to uint8 first", op)
	case op == units.Adasum && !d.Float():
		return fmt.Errorf("%v tensors cannot be reduced by Adasum, which needs a floating-point type", d)
	}
	return nil
}

// Load starts an accumulation: acc = prescale·src. acc holds AccBytes of src; where AccType is d it
// may be src.
func Load(d units.DType, acc, src []byte, prescale float64) {
	checkLen(d, acc, src)
	if len(src) > 0 {
		implementationFor(d, len(src), prescale).load(d, acc, src, prescale)
	}
}

// Add continues: acc = acc op prescale·src.
func Add(op units.ReduceOp, d units.DType, acc, src []byte, prescale float64) {
	checkLen(d, acc, src)
	if len(src) > 0 {
		implementationFor(d, len(src), prescale).add(op, d, acc, src, prescale)
	}
}

// Load2 is Load of a and Add of b in one pass over the memory. acc may be a or b where AccType is d.
func Load2(op units.ReduceOp, d units.DType, acc, a, b []byte, prescale float64) {
	checkLen(d, acc, a)
	checkLen(d, acc, b)
	if len(a) > 0 {
		implementationFor(d, len(a), prescale).load2(op, d, acc, a, b, prescale)
	}
}

// Store ends an accumulation: dst = acc·mul/div. dst may begin where acc does: then nothing
// changes when mul and div are 1 and AccType is d, and 16-bit results lie in the first half of acc.
func Store(d units.DType, dst, acc []byte, mul, div float64) {
	checkLen(d, acc, dst)
	if len(dst) > 0 {
		implementationFor(d, len(dst), 1).store(d, dst, acc, mul, div)
	}
}

// implementation is one implementation of the kernels.
type implementation interface {
	load(d units.DType, acc, src []byte, prescale float64)
	add(op units.ReduceOp, d units.DType, acc, src []byte, prescale float64)
	load2(op units.ReduceOp, d units.DType, acc, a, b []byte, prescale float64)
	store(d units.DType, dst, acc []byte, mul, div float64)
	// blend is Adasum's pairwise combination of two accumulators, into a.
	blend(acc units.DType, a, b []byte)
	String() string
}

// best is the fastest implementation of this machine.
var best = func() implementation { e := implementations(); return e[len(e)-1] }()

// inGo is up to how many bytes Go does the work where it needs no memory for it: a call into C wakes Go's monitor thread, if that
// sleeps, and a context switch takes longer.
const inGo = 8 << 10

func implementationFor(d units.DType, bytes int, prescale float64) implementation {
	if bytes <= inGo && AccType(d) == d && prescale == 1 {
		return reference{}
	}
	return best
}

// checkLen panics when acc does not have the accumulator's length for tensor: lengths were checked at the
// tensor's declaration, so this is a bug and would corrupt memory in C.
func checkLen(d units.DType, acc, tensor []byte) {
	if len(tensor)%d.Size() != 0 || len(acc) != AccBytes(d, len(tensor)) {
		panic(fmt.Sprintf("reduce: %d bytes of %v need an accumulator of %d bytes, got %d", len(tensor), d, AccBytes(d, len(tensor)), len(acc)))
	}
}
