// Package handover decides how the sums of a key go on at another server when its own is lost in an elastic job (decision 80). In such a job
// a rank pushes an iteration of a key only when it has the result of the one before, and keeps that result until the next one is there. So a
// push of iteration i proves that all iterations before i were closed, and that each rank either has the result of i-1, or lacks that alone.
package handover

import (
	"maps"
	"slices"

	"github.com/paceline/paceline/internal/rankset"
)

// Key is what the server of a key knows of iterations before its open one that somebody lacks. The zero value lacks none. The open
// iteration is core/condition's.
//
// Invariants:
//
//  1. An iteration is lacking from the first push of it, once a later one has been pushed, until its result is there.
//  2. The result of a lacking iteration is supplied by a rank that has it. Only where every live rank lacks it, so that nobody can, it is the
//     sum of the pushes that have come.
type Key struct {
	lacking map[uint64]rankset.Set // by iteration: who has pushed it, and waits
}

// Reached says that iterations before one are closed somewhere, of which open was the open one, with the pushes of some ranks; none if it
// was not begun.
func (k *Key) Reached(open uint64, pushed rankset.Set) {
	if pushed.Len() > 0 {
		k.lack(open, pushed.Clone())
	}
}

// Pushed notes the push of a closed iteration whose result is not here, and reports whether every live rank lacks it now: it is to be summed.
func (k *Key) Pushed(rank int, iteration uint64, live rankset.Set) (sum bool) {
	pushed := k.lacking[iteration]
	pushed.Add(rank)
	k.lack(iteration, pushed)
	return pushed.Covers(live)
}

// By is who lacks an iteration.
func (k *Key) By(iteration uint64) rankset.Set { return k.lacking[iteration] }

// Found says that the result of an iteration is here.
func (k *Key) Found(iteration uint64) { delete(k.lacking, iteration) }

// Live says who is left, and lists the iterations that are to be summed.
func (k *Key) Live(live rankset.Set) (sum []uint64) {
	for _, iteration := range slices.Sorted(maps.Keys(k.lacking)) {
		if k.lacking[iteration].Covers(live) {
			sum = append(sum, iteration)
		}
	}
	return sum
}

// GiveUp forgets the iterations from one on.
func (k *Key) GiveUp(from uint64) {
	maps.DeleteFunc(k.lacking, func(iteration uint64, _ rankset.Set) bool { return iteration >= from })
}

func (k *Key) lack(iteration uint64, pushed rankset.Set) {
	if k.lacking == nil {
		k.lacking = map[uint64]rankset.Set{}
	}
	k.lacking[iteration] = pushed
}
