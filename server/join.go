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
	var all bool
	var failed []agreement.Failure
	r.names.step(func(h *agreement.Home) { all, failed = h.Join(rank) })
	r.tell(failed)
	if all {
		r.allJoined(rank)
		return
	}
	r.updateMembership()
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
	r.tell(failed)
	if slices.ContainsFunc(failed, agreement.Failure.OfJoin) || slices.ContainsFunc(tensors, func(t *tensor) bool { return t.Held() }) {
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
func (r *round) allJoined(last int) {
	r.members.Anew()
	r.dropTensors(inprocess.ErrCancelled)
	r.names.step((*agreement.Home).Reset)
	joined := outbox.Frame{Header: wire.Header{Type: wire.TypeJoined, Rank: uint16(last)}}
	r.notify(r.all(), func(c *conn) { c.send(joined) }, func(n Notices) { n.Joined(last) })
}
