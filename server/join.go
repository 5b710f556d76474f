package server

import (
	"fmt"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// join notes that a rank has no more data (Horovod's join). Sums go on without it, as if it pushed
// zeros. When every rank has joined, all tensors are forgotten, because the ranks have used them
// unequally often, and everybody is told; the next use declares them anew.
func (r *round) join(rank int) {
	r.mu.Lock()
	joined := r.joinedRanks().Clone()
	joined.Add(rank)
	r.joined.Store(&joined)
	var failed []notice
	for _, n := range r.names {
		for seq, a := range n.window {
			if text := a.t.hinderedBy(joined); text != "" {
				failed = append(failed, r.failLocked(a.t, seq, units.FailUnsupported, text)...)
			} else if a.ranks.Covers(a.t.ranks.Minus(joined)) {
				delete(n.window, seq)
			}
		}
	}
	failed = append(failed, r.failJoins()...)
	all := joined.Covers(r.all)
	r.mu.Unlock()
	r.tell(failed)
	r.transfer.Without(rank)
	if all {
		r.allJoined(rank)
		return
	}
	r.takeStock()
}

// failJoins ends the joins that wait for a rank which has left instead. Callers hold mu, and take stock
// afterwards.
func (r *round) failJoins() []notice {
	joined := r.joinedRanks()
	gone := r.left.Minus(joined)
	if joined.Len() == 0 || gone.Len() == 0 {
		return nil
	}
	r.joined.Store(&rankset.Set{})
	text := fmt.Sprintf("%s has shut down without joining", gone.Named())
	return []notice{{joined, wire.Failure{Code: units.FailUnsupported, Text: text}}}
}

// takeStock tells every key who takes part in it now.
func (r *round) takeStock() {
	for _, t := range r.inUse() {
		for _, c := range t.cells() {
			c.live()
		}
		t.stock()
	}
}

// allJoined starts anew, in the next epoch, and tells everybody who came last.
func (r *round) allJoined(last int) {
	r.dropTensors(wire.ErrCancelled)
	r.mu.Lock()
	r.epoch.Add(1)
	r.joined.Store(&rankset.Set{})
	conns, local := r.firstConns(r.all), r.local
	r.mu.Unlock()
	for _, c := range conns {
		c.send(outbox.Frame{Header: wire.Header{Type: wire.TypeJoined, Rank: uint32(last)}})
	}
	if local != nil {
		local.notices.Joined(last)
	}
}

// joinedRanks are the ranks that have joined. The set is shared: do not change it.
func (r *round) joinedRanks() rankset.Set { return *r.joined.Load() }

// hinderedBy says why an operation cannot be done while ranks have joined, "" if it can: nobody else has
// the root's data, and alltoall needs everybody's rows (Horovod refuses both).
func (t *tensor) hinderedBy(joined rankset.Set) string {
	gone := joined.Overlap(t.ranks)
	switch {
	case (t.Kind.HasRoot() || t.Held()) && gone.Has(t.Root): // of a held value only its declaration is asked for
		return fmt.Sprintf("%q cannot be done: its root, rank %d, has joined", t.Name, t.Root)
	case t.Kind == units.Alltoall && gone.Len() > 0:
		return fmt.Sprintf("%q cannot be done: alltoall needs every rank, and %s has joined", t.Name, gone.Named())
	}
	return ""
}
