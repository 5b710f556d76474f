package reduce

import (
	"fmt"

	"github.com/paceline/paceline/internal/units"
)

// Adasum combines whole tensors of floats such that the common part of two gradients counts once. It
// combines a and b to
//
//	(1 − a·b/2|a|²)·a + (1 − a·b/2|b|²)·b
//
// which is their sum where they are orthogonal and their mean where they are equal. A tensor of zeros
// leaves the other unchanged. Dot products and the combination are in float64.
//
// Contributions combine in a fixed tree, so the result does not depend on their order of arrival: neighbours first, then neighbouring pairs, and so on, as Horovod's vector-halving
// distance-doubling does. Of n contributions, n not a power of two (which Horovod refuses), those
// beyond the greatest power of two p combine with the first ones before: p with 0, p+1 with 1, and so on.
//
// dst is an accumulator: it has AccBytes of a contribution, does not overlap any, and goes to Store.
// Contributions are not changed. There is at least one, and all have one length. Adasum
// allocates memory for ⌈log2 n⌉ accumulators beside dst.
func Adasum(d units.DType, dst []byte, contributions [][]byte) {
	if !d.Float() || len(contributions) == 0 {
		panic(fmt.Sprintf("reduce: Adasum of %d tensors of %v", len(contributions), d))
	}
	for _, c := range contributions {
		checkLen(d, dst, c)
	}
	if len(dst) > 0 {
		adasum(best, d, dst, contributions)
	}
}

func adasum(e implementation, d units.DType, dst []byte, contributions [][]byte) {
	power := 1
	for power*2 <= len(contributions) {
		power *= 2
	}
	var spare [][]byte // by depth of the tree
	var combine func(dst []byte, low, n, depth int)
	combine = func(dst []byte, low, n, depth int) {
		right := func() []byte {
			if len(spare) == depth {
				spare = append(spare, make([]byte, len(dst)))
			}
			return spare[depth]
		}
		switch {
		case n > 1:
			combine(dst, low, n/2, depth)
			b := right()
			combine(b, low+n/2, n/2, depth+1)
			e.blend(AccType(d), dst, b)
		case low+power < len(contributions):
			b := right()
			e.load(d, dst, contributions[low], 1)
			e.load(d, b, contributions[low+power], 1)
			e.blend(AccType(d), dst, b)
		default:
			e.load(d, dst, contributions[low], 1)
		}
	}
	combine(dst, 0, power, 0)
}
