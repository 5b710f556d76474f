package server

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// name is the state of one tensor name on its home server. Every rank tells the home server of each
// operation it starts under the name, with a count. Operations with the same count belong together:
// there the ranks that bring different things are found out, and those that do not come.
type name struct {
	generation uint64
	window     map[uint64]*arrival // by count; an entry lives until every rank has come
	// failed operations: frames of this generation or older, counted from failedFrom on, are refused
	failed           bool
	failedGeneration uint64
	failedFrom       uint64
	text             string
	code             units.FailureCode
}

type arrival struct {
	t      *tensor
	ranks  rankset.Set
	since  time.Time
	warned time.Time
}

// arrive notes that a rank has started an operation, and reports whether it may go on.
func (r *round) arrive(t *tensor, h *wire.Header) bool {
	rank := int(h.Rank)
	r.mu.Lock()
	ok, failed := r.arriveLocked(t, rank, h.Seq)
	r.mu.Unlock()
	r.tell(failed)
	return ok
}

func (r *round) arriveLocked(t *tensor, rank int, seq uint64) (bool, []notice) {
	id := nameID{t.ProcessSet, t.Name}
	n := r.names[id]
	if n == nil {
		n = &name{window: map[uint64]*arrival{}}
		r.names[id] = n
	}
	if n.failed && t.Generation <= n.failedGeneration && seq >= n.failedFrom {
		return false, []notice{{t.ranks, r.failure(t, seq, n.code, n.text)}}
	}
	var failed []notice
	if t.Generation > n.generation {
		failed = r.failWindow(n, 0, t.Generation-1, units.FailUnsupported, earlierFailure(t))
		n.generation = t.Generation
	}
	a := n.window[seq]
	if a == nil {
		a = &arrival{t: t, since: time.Now()}
		n.window[seq] = a
	}
	if a.t != t {
		a.ranks.Remove(rank)
		code, text := units.FailMismatch, fmt.Sprintf("ranks disagree about %q: %s brought %s, rank %d brought %s", t.Name, a.ranks.Named(), a.t.signature, rank, t.signature)
		if a.t.signature == t.signature { // they differ in the failures of the name that they know of
			code, text = units.FailUnsupported, earlierFailure(t)
		}
		return false, append(failed, r.failLocked(t, seq, code, text)...)
	}
	a.ranks.Add(rank)
	if gone := r.left.Minus(a.ranks); gone.Overlap(t.ranks).Len() > 0 {
		return false, append(failed, r.failLocked(t, seq, units.FailUnsupported, hasLeft(t, gone.Overlap(t.ranks).Ranks()[0]))...)
	}
	joined := r.joinedRanks()
	if joined.Has(rank) {
		text := fmt.Sprintf("%q cannot be done: rank %d has joined", t.Name, rank)
		return false, append(failed, r.failLocked(t, seq, units.FailUnsupported, text)...)
	}
	if text := t.hinderedBy(joined); text != "" {
		return false, append(failed, r.failLocked(t, seq, units.FailUnsupported, text)...)
	}
	if a.ranks.Covers(t.ranks.Minus(joined)) {
		delete(n.window, seq)
	}
	return true, failed
}

// notice is a failure and whom to tell of it: the ranks of a tensor's process set.
type notice struct {
	ranks rankset.Set
	f     wire.Failure
}

// fail ends an operation on every rank.
func (r *round) fail(t *tensor, seq uint64, code units.FailureCode, text string) {
	r.mu.Lock()
	failed := r.failLocked(t, seq, code, fmt.Sprintf("%q failed: %s", t.Name, text))
	r.mu.Unlock()
	r.tell(failed)
}

// failLocked marks an operation as failed, and with it what the ranks have started under the same
// generation of the name after it: the ranks' counts of the tensor's iterations no longer agree.
func (r *round) failLocked(t *tensor, seq uint64, code units.FailureCode, text string) []notice {
	id := nameID{t.ProcessSet, t.Name}
	n := r.names[id]
	if n == nil {
		n = &name{window: map[uint64]*arrival{}}
		r.names[id] = n
	}
	if !n.failed || t.Generation > n.failedGeneration {
		n.failed, n.failedGeneration, n.failedFrom, n.text, n.code = true, t.Generation, seq, text, code
	}
	n.failedFrom = min(n.failedFrom, seq)
	delete(n.window, seq)
	return append([]notice{{t.ranks, r.failure(t, seq, code, text)}}, r.failWindow(n, seq, t.Generation, code, text)...)
}

// failWindow fails what the ranks have started under a name, from a count on and up to a generation:
// what is of a later one was started in the knowledge of the failure.
func (r *round) failWindow(n *name, from, generation uint64, code units.FailureCode, text string) []notice {
	var failed []notice
	for seq, a := range n.window {
		if seq >= from && a.t.Generation <= generation {
			delete(n.window, seq)
			failed = append(failed, notice{a.t.ranks, r.failure(a.t, seq, code, text)})
		}
	}
	return failed
}

func (r *round) failure(t *tensor, seq uint64, code units.FailureCode, text string) wire.Failure {
	return wire.Failure{Code: code, Name: t.Name, ProcessSet: t.ProcessSet, Generation: t.Generation, Seq: seq, Text: text}
}

// tell sends failures to the ranks that they concern. Those of an operation answer with a cancel.
func (r *round) tell(notices []notice) {
	for _, n := range notices {
		r.s.cfg.Log.Debug("operation failed", zap.String("tensor", n.f.Name), zap.String("why", n.f.Text))
		r.mu.RLock()
		conns, local := r.firstConns(n.ranks), r.local
		r.mu.RUnlock()
		for _, c := range conns {
			c.sendJSON(wire.Header{Type: wire.TypeFail}, n.f)
		}
		if local != nil && n.ranks.Has(local.rank) {
			local.notices.Failed(n.f)
		}
	}
}

// cancel is a rank's word that it gave up a tensor from an iteration on.
func (r *round) cancel(h *wire.Header) {
	id, iteration, seq := h.Tensor, h.Iteration, h.Seq
	var failed []notice
	r.mu.Lock()
	t := r.tensors[id]
	if t != nil && t.Held() && !r.declaring(t, seq) { // the others go on
		r.mu.Unlock()
		t.forget(int(h.Rank), seq, h.Flags&(wire.FlagDeclare|wire.FlagOwnWill) == wire.FlagDeclare)
		return
	}
	if t != nil {
		if h.Flags&wire.FlagOwnWill != 0 {
			failed = r.failLocked(t, seq, units.FailUnsupported, fmt.Sprintf("%q was given up by rank %d, which shuts down or has an error of its own", t.Name, h.Rank))
		}
		if n := r.names[nameID{t.ProcessSet, t.Name}]; n != nil {
			if a := n.window[seq]; a != nil && a.t == t {
				if h.Flags&wire.FlagDeclare != 0 && !t.Held() { // else those that have come would wait for good
					failed = r.failLocked(t, seq, units.FailUnsupported, earlierFailure(t))
				}
				delete(n.window, seq)
			}
		}
	}
	r.mu.Unlock()
	r.tell(failed)
	if t != nil {
		r.drop(t, iteration)
	}
}

// declaring reports whether a held value is still being declared by that operation. Callers hold mu.
func (r *round) declaring(t *tensor, seq uint64) bool {
	n := r.names[nameID{t.ProcessSet, t.Name}]
	return n != nil && n.window[seq] != nil && n.window[seq].t == t
}

// drop lets go of everything held for a tensor from an iteration on.
func (r *round) drop(t *tensor, iteration uint64) {
	t.cancel(iteration, wire.ErrCancelled)
	r.transfer.Cancel(t.ID, iteration, wire.ErrCancelled)
}

// failWaitingFor fails the operations that wait for a rank which has left. Callers hold mu.
func (r *round) failWaitingFor(rank int) []notice {
	var failed []notice
	for _, t := range r.tensors {
		if !t.ranks.Has(rank) {
			continue
		}
		for _, c := range t.cells() {
			for _, seq := range c.waitsFor(rank) {
				failed = append(failed, r.failLocked(t, seq, units.FailUnsupported, hasLeft(t, rank))...)
			}
		}
	}
	for _, n := range r.names {
		for seq, a := range n.window {
			if a.t.ranks.Has(rank) && !a.ranks.Has(rank) {
				failed = append(failed, r.failLocked(a.t, seq, units.FailUnsupported, hasLeft(a.t, rank))...)
			}
		}
	}
	return failed
}

// checkStalls warns of operations that wait for ranks, and ends those that wait too long.
func (r *round) checkStalls(now time.Time) {
	cfg := r.s.cfg
	var failed []notice
	type stalled struct {
		a     *arrival
		stall wire.Stall
	}
	var slow []stalled
	r.mu.Lock()
	for _, n := range r.names {
		for seq, a := range n.window {
			waited := now.Sub(a.since)
			missing := a.t.ranks.Minus(a.ranks).Minus(r.joinedRanks())
			quorum, known := a.t.Model.Quorum(len(a.t.Ranks))
			switch {
			case known && a.ranks.Len() >= quorum: // nobody waits for the others
			case cfg.StallShutdown > 0 && waited >= cfg.StallShutdown:
				text := fmt.Sprintf("%q stalled: %s did not come within %v, while %s waited", a.t.Name, missing.Named(), cfg.StallShutdown, a.ranks.Named())
				failed = append(failed, r.failLocked(a.t, seq, units.FailStall, text)...)
			case cfg.StallWarning > 0 && waited >= cfg.StallWarning && now.Sub(a.warned) >= cfg.StallWarning:
				a.warned = now
				slow = append(slow, stalled{&arrival{t: a.t, ranks: a.ranks.Clone()}, wire.Stall{Name: a.t.Name, Missing: missing.Ranks(), Seconds: waited.Seconds()}})
			}
		}
	}
	r.mu.Unlock()
	r.tell(failed)
	for _, t := range r.inUse() {
		t.checkStalls(now)
	}
	for _, s := range slow {
		r.warn(s.a.ranks, s.stall)
	}
}

// warn tells the lowest rank that waits, which logs it: one line for all.
func (r *round) warn(waiting rankset.Set, stall wire.Stall) {
	ranks := waiting.Ranks()
	if len(ranks) == 0 {
		return
	}
	r.mu.RLock()
	local, conns := r.local, r.firstConns(rankset.Of(ranks[0]))
	r.mu.RUnlock()
	if local != nil && local.rank == ranks[0] {
		local.notices.Stalled(stall)
	}
	for _, c := range conns {
		c.sendJSON(wire.Header{Type: wire.TypeStall}, stall)
	}
}

func hasLeft(t *tensor, rank int) string {
	return fmt.Sprintf("%q cannot be done: rank %d has shut down", t.Name, rank)
}

func earlierFailure(t *tensor) string {
	text := fmt.Sprintf("%q cannot be done: an operation of that name before it failed", t.Name)
	if t.Codec != "" {
		text += ", or only some ranks have loaded a compression state; every rank loads its own, behind a barrier"
	}
	return text
}
