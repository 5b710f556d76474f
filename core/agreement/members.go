package agreement

import (
	"fmt"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
)

// Joined are the ranks that have no more data (Horovod's join). Operations go on without them. The set is shared:
// do not change it.
func (h *Home) Joined() rankset.Set { return h.joined }

// Left are the ranks that said goodbye. The set is shared: do not change it.
func (h *Home) Left() rankset.Set { return h.left }

// Latest is the rank that joined last.
func (h *Home) Latest() int { return h.latest }

// Join notes that a rank has no more data, and reports whether that is every rank now: then Reset follows.
func (h *Home) Join(rank int) (all bool, failures []Failure) {
	if h.cfg.Elastic && h.left.Has(rank) {
		return false, nil // it was lost meanwhile
	}
	joined := h.joined.Clone()
	joined.Add(rank)
	h.joined, h.latest = joined, rank
	for _, w := range h.pick(func(w waiting) bool { return w.a.t.Ranks.Has(rank) }) {
		if !w.still() {
			continue
		}
		if text := w.a.t.hinderedBy(joined.Minus(w.a.ranks)); text != "" {
			failures = h.fail(failures, w.n, w.a.t, w.count, reason{units.FailUnsupported, text})
		} else if h.complete(w.a) {
			h.drop(w.n, w.count)
		}
	}
	failures = h.failJoins(failures)
	h.checkAll()
	return h.allJoined(), failures
}

// TakeBack notes that the joins so far have failed at the servers of the job.
func (h *Home) TakeBack() {
	h.joined = rankset.Set{}
	h.checkAll()
}

// allJoined reports whether every rank that is left has joined, and some have.
func (h *Home) allJoined() bool {
	all := h.cfg.All
	if h.cfg.Elastic {
		all = all.Minus(h.left)
	}
	return h.joined.Len() > 0 && h.joined.Covers(all)
}

// Waiting is an operation that waits for a rank on this server, whether all ranks have come to it or not.
type Waiting struct {
	Tensor *Tensor
	Count  uint64
}

// Lose notes that a rank of an elastic job has left or was lost. Operations go on without it, but for those that cannot be done
// then. It reports whether all that are left have joined now: then Reset follows.
func (h *Home) Lose(rank int) (all bool, failures []Failure) {
	left, joined := h.left.Clone(), h.joined.Clone()
	left.Add(rank)
	joined.Remove(rank)
	h.left, h.joined = left, joined
	for _, w := range h.pick(func(w waiting) bool { return w.a.t.Ranks.Has(rank) && !w.a.ranks.Has(rank) }) {
		if !w.still() {
			continue
		}
		if text := w.a.t.brokenBy(left.Minus(w.a.ranks)); text != "" {
			failures = h.fail(failures, w.n, w.a.t, w.count, reason{units.FailUnsupported, text})
		} else if h.complete(w.a) {
			h.drop(w.n, w.count)
		}
	}
	h.checkAll()
	return h.allJoined(), failures
}

// Leave notes that a rank says goodbye, and fails what waits for it: in the windows, what the caller has found,
// and the joins of other ranks.
func (h *Home) Leave(rank int, elsewhere []Waiting) (failures []Failure) {
	left := h.left.Clone()
	left.Add(rank)
	h.left = left
	for _, w := range elsewhere {
		failures = h.fail(failures, h.name(w.Tensor), w.Tensor, w.Count, reason{units.FailUnsupported, hasLeft(w.Tensor, rank)})
	}
	for _, w := range h.pick(func(w waiting) bool { return w.a.t.Ranks.Has(rank) && !w.a.ranks.Has(rank) }) {
		if w.still() {
			failures = h.fail(failures, w.n, w.a.t, w.count, reason{units.FailUnsupported, hasLeft(w.a.t, rank)})
		}
	}
	failures = h.failJoins(failures)
	h.checkAll()
	return failures
}

// failJoins ends the joins that wait for a rank which has left instead.
func (h *Home) failJoins(failures []Failure) []Failure {
	gone := h.left.Minus(h.joined)
	if h.joined.Len() == 0 || gone.Len() == 0 || h.cfg.Elastic {
		return failures
	}
	joined := h.joined
	h.joined = rankset.Set{}
	return append(failures, Failure{Ranks: joined, Code: units.FailUnsupported, Text: fmt.Sprintf("%s has shut down without joining", gone.Named())})
}
