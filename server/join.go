package server

import (
	"slices"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// join notes that a rank has no more data (Horovod's join). Sums go on without it, as if it pushed
// zeros. When every rank has joined, all tensors are forgotten, because the ranks have used them
// unequally often, and everybody is told; the next use declares them anew.
func (r *round) join(rank int) {
	if r.joinsFail() {
		return
	}
	var all bool
	var failed []agreement.Failure
	r.names.step(func(h *agreement.Home) { all, failed = h.Join(rank) })
	if slices.ContainsFunc(failed, agreement.Failure.OfJoin) { // before these ranks hear of it and push again
		r.updateMembership()
	}
	r.tell(failed)
	switch {
	case all && r.settings.Hosts.Uplink != nil:
		r.hostJoined(func(h *hostJoin) { h.here = true })
	case all:
		r.allJoined(rank)
	default:
		r.updateMembership()
	}
}

// hostJoin is what a server that sums for its host knows of a join of the whole job.
type hostJoin struct {
	here   bool // every rank of the host has joined
	job    bool // every rank of the job has, as the worker in this process has heard
	last   int  // of them
	failed bool // a rank has left without joining, so that no more joins succeed
}

func (r *round) joinsFail() bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.joining.failed
}

// hostJoined notes one of these, and begins anew with both: the servers of the job hear of joins that this one does not, and
// what is on its way to this one may be late.
func (r *round) hostJoined(note func(*hostJoin)) {
	r.mu.Lock()
	note(&r.joining)
	is := r.joining
	if is.here && is.job {
		r.joining = hostJoin{}
	}
	r.mu.Unlock()
	if is.here && is.job {
		r.allJoined(is.last)
	}
}

// takeBack notes, as a rank has heard from the servers of the job, that joins fail because a rank has left without joining: all
// ranks of the host go on.
func (r *round) takeBack() {
	r.mu.Lock()
	r.joining = hostJoin{failed: true}
	r.mu.Unlock()
	r.names.step((*agreement.Home).TakeBack)
	r.updateMembership() // on each connection: what comes behind this there finds its rank back
}

// bye notes that a rank leaves on purpose. What others still want from it fails, unless the job is elastic.
func (r *round) bye(rank int) {
	if r.settings.Elastic {
		r.without(rank)
		return
	}
	r.messages.Leave(rank)
	var waiting []agreement.Waiting
	tensors := r.inUse()
	for _, t := range tensors {
		if !t.Members.Has(rank) {
			continue
		}
		for _, seq := range t.keys.WaitsFor(rank) {
			waiting = append(waiting, agreement.Waiting{Tensor: t.agreed, Count: seq})
		}
	}
	var failed []agreement.Failure
	r.names.step(func(h *agreement.Home) { failed = h.Leave(rank, waiting) })
	if r.leftRanks().Covers(r.all()) {
		r.desert()
	}
	if r.settings.Hosts.Uplink != nil { // the servers of the job say so, which know of every use
		return
	}
	if slices.ContainsFunc(failed, agreement.Failure.OfJoin) { // before these ranks hear of it and push again
		r.updateMembership()
	}
	r.tell(failed)
	if slices.ContainsFunc(tensors, func(t *tensor) bool { return t.Held() }) {
		r.updateMembership()
	}
}

// updateMembership tells every key who takes part in it now.
func (r *round) updateMembership() {
	for _, t := range r.inUse() {
		t.keys.UpdateMembership()
	}
}

// allJoined starts anew, in the next epoch, and tells everybody who came last. The epoch begins before the tensors are
// forgotten: what a rank sent before it heard of the last join, such as the report of a superstep that the joins have
// ended, is then of an earlier epoch and not about an unknown tensor.
func (r *round) allJoined(last int) { r.anew(last, r.members.Anew) }

func (r *round) anew(last int, next func()) {
	next()
	r.dropTensors(inprocess.ErrCancelled)
	r.names.reset()
	joins := r.members.Now().Joins
	r.notify(r.all(), func(c *conn) { c.joined(joins, last) }, func(n Notices) { n.Joined(last) })
}

// joined tells a rank, once, that all ranks had joined so often, if it does not know.
func (c *conn) joined(joins uint32, last int) {
	for knows := c.joins.Load(); knows < joins; knows = c.joins.Load() {
		if c.joins.CompareAndSwap(knows, joins) {
			c.send(outbox.Frame{Header: wire.Header{Type: wire.TypeJoined, Rank: uint16(last)}})
			return
		}
	}
}
