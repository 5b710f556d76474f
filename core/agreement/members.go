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

// Join notes that a rank has no more data, and reports whether that is every rank now: then Reset follows.
func (h *Home) Join(rank int) (all bool, told []Failure) {
	joined := h.joined.Clone()
	joined.Add(rank)
	h.joined = joined
	for _, w := range h.pick(func(a *arrival) bool { return a.t.Ranks.Has(rank) }) {
		if !w.still() {
			continue
		}
		if text := w.a.t.hinderedBy(joined); text != "" {
			told = h.fail(told, w.n, w.a.t, w.count, reason{units.FailUnsupported, text})
		} else if h.complete(w.a) {
			h.drop(w.n, w.count)
		}
	}
	told = h.failJoins(told)
	h.checkAll()
	return joined.Covers(h.cfg.All), told
}

// Waiting is an operation that waits for a rank on this server, whether all ranks have come to it or not.
type Waiting struct {
	Tensor *Tensor
	Count  uint64
}

// Leave notes that a rank says goodbye, and fails what waits for it: in the windows, what the caller has found,
// and the joins of other ranks.
func (h *Home) Leave(rank int, elsewhere []Waiting) (told []Failure) {
	left := h.left.Clone()
	left.Add(rank)
	h.left = left
	for _, w := range elsewhere {
		told = h.fail(told, h.name(w.Tensor), w.Tensor, w.Count, reason{units.FailUnsupported, hasLeft(w.Tensor, rank)})
	}
	for _, w := range h.pick(func(a *arrival) bool { return a.t.Ranks.Has(rank) && !a.ranks.Has(rank) }) {
		if w.still() {
			told = h.fail(told, w.n, w.a.t, w.count, reason{units.FailUnsupported, hasLeft(w.a.t, rank)})
		}
	}
	told = h.failJoins(told)
	h.checkAll()
	return told
}

// failJoins ends the joins that wait for a rank which has left instead.
func (h *Home) failJoins(told []Failure) []Failure {
	gone := h.left.Minus(h.joined)
	if h.joined.Len() == 0 || gone.Len() == 0 {
		return told
	}
	joined := h.joined
	h.joined = rankset.Set{}
	return append(told, Failure{Ranks: joined, Code: units.FailUnsupported, Text: fmt.Sprintf("%s has shut down without joining", gone.Named())})
}
