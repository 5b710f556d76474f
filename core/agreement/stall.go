package agreement

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

// Tick finds the operations that have waited too long for ranks: it warns of them, again and again, and ends them
// in the end.
func (h *Home) Tick(now time.Duration) (slow []Stall, failures []Failure) {
	for _, w := range h.pick(func(w waiting) bool { return h.late(w.a, now) && w.lacks() }) {
		if !w.still() {
			continue
		}
		a := w.a
		waited, missing := now-a.since, h.missing(a)
		if over(waited, h.cfg.StallShutdown) {
			text := fmt.Sprintf("%q stalled: %s did not come within %v, while %s waited", a.t.Name, missing.Named(), h.cfg.StallShutdown, a.ranks.Named())
			failures = h.fail(failures, w.n, a.t, w.count, reason{units.FailStall, text})
			continue
		}
		a.warned = now
		slow = append(slow, Stall{Ranks: a.ranks.Clone(), Name: a.t.Name, Missing: missing, Waited: waited})
	}
	h.checkAll()
	return slow, failures
}

// Longest are the operations that have waited longest for ranks, at most so many.
func (h *Home) Longest(now time.Duration, most int) []Stall {
	found := h.pick(waiting.lacks)
	slices.SortStableFunc(found, func(a, b waiting) int { return cmp.Compare(a.a.since, b.a.since) })
	var all []Stall
	for _, w := range found[:min(len(found), most)] {
		a := w.a
		all = append(all, Stall{Ranks: a.ranks.Clone(), Name: a.t.Name, Missing: h.missing(a), Waited: now - a.since})
	}
	return all
}

// lacks reports whether somebody waits for the ranks that have not come. Those of a straggler that enough do without are waited for when it is as far
// behind as sums are kept (condition.DropStragglers).
func (w waiting) lacks() bool {
	if w.a.t.Enough == 0 || w.a.ranks.Len() < w.a.t.Enough {
		return true
	}
	for older := range w.n.window {
		if w.count >= older+limits.MaxKept {
			return true
		}
	}
	return false
}

// late reports whether something is due for an operation that waits.
func (h *Home) late(a *arrival, now time.Duration) bool {
	return over(now-a.since, h.cfg.StallShutdown) || over(now-max(a.since, a.warned), h.cfg.StallWarning)
}

func over(waited, limit time.Duration) bool { return limit > 0 && waited >= limit }
