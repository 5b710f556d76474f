package agreement

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
)

// Config says how a Home works.
type Config struct {
	All           rankset.Set   // ranks of the job
	StallWarning  time.Duration // warn of operations that wait this long; 0 for never
	StallShutdown time.Duration // end those that wait this long; 0 for never
	Elastic       bool          // operations go on without ranks that have left or were lost
}

// Home is what one server has heard of the names in one round of the job. The names whose home is elsewhere have
// nothing in their windows, but they fail here as well: for want of memory, or by a message that cannot be decoded.
//
// Invariants, checked after each step in builds with the tag invariants:
//
//  1. An operation is in its name's window from the coming of its first rank until its last one comes or it
//     fails: what is in the window lacks a rank of its process set that has not joined.
//  2. No operation in a window waits for a rank that has left, and none is hindered by one that has joined (in an elastic job: or left).
//  3. A rank is told of a failed operation once, and again only where it brings that operation afterwards: it may
//     not have been connected when the others were told. (Home remembers the latest maxReported failures of a name.)
//  4. What has failed is not in the window: no operation that ranks were told of, and none of the failed generation
//     from its first failed count on.
//  5. Beside its own count a failure ends only operations of its own generation or an older one, from that count
//     on: a rank that brings a later generation knew of a failure when it started.
type Home struct {
	cfg    Config
	names  map[ID]*name
	joined rankset.Set // replaced, never changed
	left   rankset.Set // replaced, never changed
	latest int         // that joined
	spare  []*arrival

	waiting int // operations in all windows
}

// name is the state of one name.
type name struct {
	generation uint64              // the latest that a rank brought
	window     map[uint64]*arrival // by count
	failed     *failed             // nil while nothing failed
	reported   map[uint64]reason   // counts whose failure every rank was told of
}

// arrival is an operation for which some of its ranks have come.
type arrival struct {
	t      *Tensor
	ranks  rankset.Set
	since  time.Duration
	warned time.Duration // 0 for never
}

// failed operations are those of this generation or an older one, from a count on.
type failed struct {
	generation uint64
	from       uint64
	reason
}

func (f *failed) covers(t *Tensor, count uint64) bool {
	return f != nil && t.Generation <= f.generation && count >= f.from
}

type reason struct {
	code units.FailureCode
	text string
}

const (
	maxSpare    = 256 // arrivals that are kept to be used again
	maxReported = 256 // failures of a name that are remembered
)

// NewHome makes a machine that has heard of nothing.
func NewHome(c Config) *Home {
	return &Home{cfg: c, names: map[ID]*name{}}
}

// Arrive notes that a rank has started an operation, and reports whether it may go on.
func (h *Home) Arrive(t *Tensor, rank int, count uint64, now time.Duration) (proceed bool, failures []Failure) {
	n := h.name(t)
	proceed, failures = h.arrive(n, t, rank, count, now)
	h.check(t.ID, n)
	return proceed, failures
}

func (h *Home) arrive(n *name, t *Tensor, rank int, count uint64, now time.Duration) (bool, []Failure) {
	if why, ok := n.reported[count]; ok {
		return false, []Failure{{Ranks: rankset.Of(rank), Tensor: t, Count: count, Code: why.code, Text: why.text}}
	}
	if n.failed.covers(t, count) {
		return false, h.end(nil, n, t, count, n.failed.reason)
	}
	var failures []Failure
	if t.Generation > n.generation {
		if n.generation = t.Generation; len(n.window) > 0 {
			failures = h.failWindow(nil, n, 0, t.Generation-1, reason{units.FailUnsupported, earlierFailure(t, rankset.Of(rank))})
		}
	}
	if _, ok := n.reported[count]; ok { // just now: others had brought an earlier generation
		return false, failures
	}
	a := n.window[count]
	if a == nil {
		a = h.newArrival(t, now)
		n.window[count] = a
		h.waiting++
	}
	if why := h.hindrance(a, t, rank); why.text != "" {
		return false, h.fail(failures, n, t, count, why)
	}
	if h.complete(a) {
		h.drop(n, count)
	}
	return true, failures
}

// hindrance counts the rank in, and says why the operation cannot be done then.
func (h *Home) hindrance(a *arrival, t *Tensor, rank int) reason {
	if a.t != t {
		a.ranks.Remove(rank)
		if a.t.Signature == t.Signature { // they differ in the failures of the name that they know of
			know := rankset.Of(rank)
			if a.t.Generation > t.Generation {
				know = a.ranks
			}
			return reason{units.FailUnsupported, earlierFailure(t, know)}
		}
		return reason{units.FailMismatch, fmt.Sprintf("ranks disagree about %q: %s brought %s, rank %d brought %s",
			t.Name, a.ranks.Named(), a.t.Signature, rank, t.Signature)}
	}
	a.ranks.Add(rank)
	if h.left.Len() > 0 {
		if h.cfg.Elastic {
			if text := t.brokenBy(h.left.Minus(a.ranks)); text != "" {
				return reason{units.FailUnsupported, text}
			}
		} else if gone := h.left.Overlap(t.Ranks).Minus(a.ranks); gone.Len() > 0 {
			return reason{units.FailUnsupported, hasLeft(t, gone.Ranks()[0])}
		}
	}
	if h.joined.Has(rank) {
		return reason{units.FailUnsupported, fmt.Sprintf("%q cannot be done: rank %d has joined", t.Name, rank)}
	}
	// Who has brought it before joining has given its part: a reducescatter ends on a rank without rows when that is sent.
	return reason{units.FailUnsupported, t.hinderedBy(h.joined.Minus(a.ranks))}
}

// complete reports whether every rank has come that can.
func (h *Home) complete(a *arrival) bool {
	if h.cfg.Elastic {
		return a.t.Ranks.Without(a.ranks, h.joined, h.left) == 0
	}
	return a.t.Ranks.Without(a.ranks, h.joined) == 0
}

// missing are the ranks that an operation waits for.
func (h *Home) missing(a *arrival) rankset.Set {
	missing := a.t.Ranks.Minus(a.ranks).Minus(h.joined)
	if h.cfg.Elastic {
		missing = missing.Minus(h.left)
	}
	return missing
}

// Fail ends an operation on every rank for a reason found on this server.
func (h *Home) Fail(t *Tensor, count uint64, code units.FailureCode, why string) []Failure {
	n := h.name(t)
	failures := h.fail(nil, n, t, count, reason{code, fmt.Sprintf("%q failed: %s", t.Name, why)})
	h.check(t.ID, n)
	return failures
}

// Undeclared notes that a rank gives up an operation whose tensor it has not declared, and ends it on every rank. Of the tensor it
// knows the name, the generation and the ranks.
func (h *Home) Undeclared(t *Tensor, count uint64, code units.FailureCode, text string) []Failure {
	n := h.name(t)
	failures := h.fail(nil, n, t, count, reason{code, text})
	h.check(t.ID, n)
	return failures
}

// Expired is Undeclared for an operation whose own timeout has passed on a rank: all ranks hear the text, and who did not come.
func (h *Home) Expired(t *Tensor, rank int, count uint64, text string) []Failure {
	if a := h.name(t).window[count]; a != nil && a.t.Generation == t.Generation {
		if missing := h.missing(a).Minus(rankset.Of(rank)); missing.Len() > 0 { // its own frame may be on its way
			text += fmt.Sprintf(": %s did not come", missing.Named())
		}
	}
	return h.Undeclared(t, count, units.FailStall, text)
}

// Why a rank cancels.
type Why uint8

// Reasons of cancels.
const (
	// Heard: a server told it of the failure, as it tells every rank.
	Heard Why = iota
	// OwnWill: for a reason of its own, of which the others hear from here.
	OwnWill
	// Anew: the rank goes on with the tensor declared anew, and brings no such operation as the others may have.
	Anew
)

// Cancel notes that a rank gives up a tensor from an operation on. It reports whether that is the rank's own
// affair: of a held value, whose declaration is over, because the others go on.
func (h *Home) Cancel(t *Tensor, rank int, count uint64, why Why) (alone bool, failures []Failure) {
	n := h.name(t)
	a := n.window[count]
	if a != nil && a.t != t {
		a = nil
	}
	switch {
	case a == nil && t.holds():
		return true, nil
	case why == OwnWill:
		because := reason{units.FailUnsupported, fmt.Sprintf("%q was given up by rank %d, which shuts down or has an error of its own", t.Name, rank)}
		if n.failed.covers(t, count) { // it goes with the one that failed before it
			because = n.failed.reason
		}
		failures = h.fail(nil, n, t, count, because)
	case a == nil:
	case why == Anew: // else those that have come would wait for good
		failures = h.fail(nil, n, t, count, reason{units.FailUnsupported, earlierFailure(t, rankset.Of(rank))})
	default:
		h.drop(n, count)
	}
	h.check(t.ID, n)
	return false, failures
}

// Over notes that all ranks have come to an operation where its home was before, or that they come to it where its home is now.
func (h *Home) Over(t *Tensor, count uint64) {
	n := h.name(t)
	if a := n.window[count]; a != nil && a.t == t {
		h.drop(n, count)
	}
	h.check(t.ID, n)
}

// Reset forgets every name, and who has joined: all ranks have, and begin anew.
func (h *Home) Reset() {
	h.names, h.joined, h.waiting = map[ID]*name{}, rankset.Set{}, 0
}

// Forget forgets the names of a process set that nobody uses any more.
func (h *Home) Forget(set uint32) {
	for id, n := range h.names {
		if id.Set == set {
			h.waiting -= len(n.window)
			delete(h.names, id)
		}
	}
}

// Waiting is the number of operations that some of their ranks have come to, and not all.
func (h *Home) Waiting() int { return h.waiting }

func (h *Home) name(t *Tensor) *name {
	n := h.names[t.ID]
	if n == nil {
		n = &name{window: map[uint64]*arrival{}}
		h.names[t.ID] = n
	}
	return n
}

// fail marks an operation as failed, and with it what the ranks have started under the same generation of the
// name after it: the ranks' counts of the tensor's iterations no longer agree.
func (h *Home) fail(failures []Failure, n *name, t *Tensor, count uint64, why reason) []Failure {
	switch {
	case n.failed == nil || t.Generation > n.failed.generation:
		n.failed = &failed{generation: t.Generation, from: count, reason: why}
	case t.Generation == n.failed.generation:
		n.failed.from = min(n.failed.from, count)
	}
	failures = h.end(failures, n, t, count, why)
	return h.failWindow(failures, n, count, t.Generation, why)
}

// failWindow fails what the ranks have started under a name, from a count on and up to a generation: what is of
// a later one was started in the knowledge of the failure.
func (h *Home) failWindow(failures []Failure, n *name, from, generation uint64, why reason) []Failure {
	var counts []uint64
	for count, a := range n.window {
		if count >= from && a.t.Generation <= generation {
			counts = append(counts, count)
		}
	}
	slices.Sort(counts)
	for _, count := range counts {
		failures = h.end(failures, n, n.window[count].t, count, why)
	}
	return failures
}

// end takes a failed operation out of the window, whatever generations its ranks have brought, and tells every rank
// of the process set, unless they were told.
func (h *Home) end(failures []Failure, n *name, t *Tensor, count uint64, why reason) []Failure {
	h.drop(n, count)
	if _, ok := n.reported[count]; ok {
		return failures
	}
	if n.reported == nil {
		n.reported = map[uint64]reason{}
	}
	n.reported[count] = why
	if len(n.reported) > maxReported {
		delete(n.reported, slices.Min(slices.Collect(maps.Keys(n.reported))))
	}
	return append(failures, Failure{Ranks: t.Ranks, Tensor: t, Count: count, Code: why.code, Text: why.text})
}

func (h *Home) newArrival(t *Tensor, now time.Duration) *arrival {
	last := len(h.spare) - 1
	if last < 0 {
		return &arrival{t: t, since: now}
	}
	a := h.spare[last]
	h.spare = h.spare[:last]
	a.t, a.since, a.warned = t, now, 0
	return a
}

// drop takes an operation out of the window.
func (h *Home) drop(n *name, count uint64) {
	a := n.window[count]
	if a == nil {
		return
	}
	delete(n.window, count)
	h.waiting--
	if a.t = nil; len(h.spare) < maxSpare {
		a.ranks.Reset()
		h.spare = append(h.spare, a)
	}
}

// waiting is an operation in a window.
type waiting struct {
	id    ID
	n     *name
	count uint64
	a     *arrival
}

// pick lists the operations in all windows that fit, in the order of their names and counts.
func (h *Home) pick(fits func(waiting) bool) []waiting {
	var found []waiting
	for id, n := range h.names {
		for count, a := range n.window {
			if w := (waiting{id, n, count, a}); fits(w) {
				found = append(found, w)
			}
		}
	}
	slices.SortFunc(found, func(a, b waiting) int {
		return cmp.Or(a.id.compare(b.id), cmp.Compare(a.count, b.count))
	})
	return found
}

// still reports whether the operation has not failed with one before it.
func (w *waiting) still() bool { return w.n.window[w.count] == w.a }
