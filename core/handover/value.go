package handover

import (
	"github.com/paceline/paceline/internal/rankset"
)

// Value is how a held value goes on at another server (decision 100). In an elastic job a rank keeps the newest value that it was sent, with what that
// covers. Every answer comes after the rank's own push, so that it covers all that the rank has pushed but what it waits for. The zero Value is that of
// a key for which nobody has come.
//
// Invariants:
//
//  1. A value goes on only when every rank that had it has supplied its own, or is gone. So the newest covers what any of them has.
//  2. A push that it covers is not added again, though its rank waits for an answer; one that it does not cover comes with its rank.
type Value struct {
	in       rankset.Set // who has supplied a value, or waits for the first
	supplied bool
	newest   Cover
}

// Came says that a rank has no value: it comes to declare it.
func (v *Value) Came(rank int) { v.in.Add(rank) }

// Supplied says that a rank has supplied its value, and reports whether that is the newest so far.
func (v *Value) Supplied(rank int, c Cover) (newest bool) {
	v.in.Add(rank)
	if v.supplied && c.operations() <= v.newest.operations() {
		return false
	}
	v.supplied, v.newest = true, c
	return true
}

// Newest is what the newest value covers; not ok where nobody has supplied one.
func (v *Value) Newest() (c Cover, ok bool) { return v.newest, v.supplied }

// Missing are the ranks whose value is waited for. It is empty where nobody has supplied one: then the value begins as every new one does.
func (v *Value) Missing(gone rankset.Set) (missing rankset.Set) {
	for _, r := range v.newest.Ranks {
		if !v.in.Has(r.Rank) && !gone.Has(r.Rank) {
			missing.Add(r.Rank)
		}
	}
	return missing
}
