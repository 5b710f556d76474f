package agreement

import (
	"slices"

	"github.com/paceline/paceline/internal/invariant"
)

// joinShift keeps the generations before and after a join of all ranks apart: the upper bits are the number of joins.
const joinShift = 40

// SameJoin reports whether two generations of a name are of the time between the same joins of all ranks.
func SameJoin(a, b uint64) bool { return a>>joinShift == b>>joinShift }

// beside keeps the counts of what is no operation on a name apart from those of operations.
const beside = 1 << 63

// Uses is what one rank knows of one name: how often it has used it, and what has failed. O is what the rank has in
// flight, D a declaration of its own; the zero D is none.
//
// Invariants:
//
//  1. A count is given to one operation, in rising order, whether that has failed before it begins or not.
//  2. The generation only rises, and past each failure: what is declared afterwards has keys that no operation
//     has used which knew less. Where a failure is heard of before its operation begins here, those before it have a
//     generation of their own: the other ranks count no iteration of theirs.
//  3. What is heard of a failure before its operation begins here is kept until then, and no longer.
type Uses[O any, D comparable] struct {
	joins      uint32
	next       uint64
	others     uint64 // what has been in flight beside the operations
	generation uint64
	inflight   map[uint64]use[O, D]
	known      map[uint64]error // failures of operations that have not begun here
}

type use[O any, D comparable] struct {
	o          O
	d          D
	generation uint64
}

// NewUses makes the state of a name that was not used since so many joins of all ranks.
func NewUses[O any, D comparable](joins uint32) Uses[O, D] {
	return Uses[O, D]{joins: joins, generation: uint64(joins) << joinShift, inflight: map[uint64]use[O, D]{}}
}

// Generation is what the next declaration belongs to.
func (u *Uses[O, D]) Generation() uint64 { return u.generation }

// Next is the count of the next operation.
func (u *Uses[O, D]) Next() uint64 { return u.next }

// InFlight is the number of operations that have begun and not ended.
func (u *Uses[O, D]) InFlight() int { return len(u.inflight) }

// Count counts an operation. Where there is an error it has failed on another rank before it begins here. Such a one
// takes no iteration: the ranks that it failed on declare anew, and where the generation rises, so does this one.
func (u *Uses[O, D]) Count() (count uint64, err error) {
	count = u.next
	u.next++
	if len(u.known) > 0 {
		if err = u.known[count]; err != nil {
			delete(u.known, count)
			u.Anew(count)
		}
	}
	return count, err
}

// Begin has an operation be in flight under its count. One that has failed already has no declaration.
func (u *Uses[O, D]) Begin(count uint64, o O, d D) {
	if invariant.On {
		_, twice := u.inflight[count]
		invariant.Check(!twice && count < u.next, "1: operation %d begins, where %d is next", count, u.next)
	}
	u.inflight[count] = use[O, D]{o, d, u.generation}
}

// Beside has something be in flight that is no operation on the name and needs no agreement, so that nothing of the
// name begins meanwhile. Its count is that of no operation, so that a late answer to it is nobody's.
func (u *Uses[O, D]) Beside(o O, d D) (count uint64) {
	count = beside | u.others
	u.others++
	u.inflight[count] = use[O, D]{o, d, u.generation}
	return count
}

// End forgets an operation.
func (u *Uses[O, D]) End(count uint64) { delete(u.inflight, count) }

// Verdict is what a failure means on one rank.
type Verdict[O any] struct {
	Failed []O  // the operation that fails, if it is in flight
	Later  []O  // what the rank gives up with it, by its own will, in the order of counts
	Anew   bool // what the name has been declared as is over
}

// Failed notes that an operation has failed on every rank. With it go the later ones whose iterations the cancel of
// the failed one gives up: those of the same declaration, or, where the failed one is over on this rank, all that did not know
// of the failure.
func (u *Uses[O, D]) Failed(generation, count uint64, err error) (v Verdict[O]) {
	if !SameJoin(generation, u.generation) {
		return v
	}
	if count >= u.next {
		if u.known == nil {
			u.known = map[uint64]error{}
		}
		u.known[count] = err
		v.Anew = u.raise(u.behind(count) - 1)
		return v
	}
	v.Anew = u.Anew(count)
	failed, here := u.inflight[count]
	if here {
		v.Failed = append(v.Failed, failed.o)
	}
	goes := func(o use[O, D]) bool { return o.d == failed.d }
	if !here {
		goes = func(o use[O, D]) bool { return o.generation < u.behind(count) }
	}
	for _, later := range u.after(count, goes) {
		v.Later = append(v.Later, u.inflight[later].o)
		if later < beside {
			v.Anew = u.Anew(later) || v.Anew
		}
	}
	return v
}

// after lists the counts of what has begun after an operation and goes with it.
func (u *Uses[O, D]) after(count uint64, goes func(use[O, D]) bool) (counts []uint64) {
	var none D
	for c, o := range u.inflight {
		if c > count && o.d != none && goes(o) {
			counts = append(counts, c)
		}
	}
	slices.Sort(counts)
	return counts
}

// Anew has what follows an operation be declared anew, and reports whether that is news.
func (u *Uses[O, D]) Anew(after uint64) bool { return u.raise(u.behind(after)) }

// behind is the generation of what follows an operation in the knowledge that it has failed. It is even: the odd one below is of
// what begins before the operation in that knowledge.
func (u *Uses[O, D]) behind(count uint64) uint64 { return uint64(u.joins)<<joinShift + 2*(count+1) }

func (u *Uses[O, D]) raise(to uint64) bool {
	if to <= u.generation {
		return false
	}
	u.generation = to
	return true
}
