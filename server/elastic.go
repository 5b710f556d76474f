package server

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// What a server does in an elastic job when a rank has gone: the others go on without it. What it has pushed whole counts, and every
// key closes when all who are left have pushed. The keys of a server that has gone with the rank come here by their first pushes.

// follow goes on in a later epoch of the round, without the ranks that it has lost.
func (r *round) follow(e *membership.Epoch) {
	news, err := r.members.Follow(e)
	if err != nil {
		r.s.cfg.Log.Error("an epoch that cannot follow", zap.Uint32("epoch", e.Number), zap.Error(err))
		return
	}
	if news.Moved {
		r.updateMembership() // keys that are elsewhere now send away what waits for them
	}
	for _, d := range news.Lost {
		if d.Role != membership.WorkerRole {
			continue
		}
		r.s.cfg.Log.Info("goes on without a rank that was lost", zap.Int("rank", d.Number), zap.Uint32("epoch", e.Number), zap.String("why", d.Why))
		r.without(d.Number)
		r.dismiss(d)
	}
	r.leftBefore(e)
}

// leftBefore goes on without ranks that were lost, or may have said goodbye, before this server joined the job.
func (r *round) leftBefore(e *membership.Epoch) {
	there := e.Live().Minus(e.Left)
	for _, rank := range rankset.Range(len(e.Workers)).Minus(there).Minus(r.leftRanks()).Ranks() {
		r.without(rank)
	}
}

// reach begins anew as a rank already has: where this server joined the job late, that had heard of the last rank's join and this one had not. Every rank that is
// not as far waits for this server's word.
func (r *round) reach(joins uint32, rank int) {
	if r.settings.Elastic && r.members.Now().Joins < joins {
		r.anew(rank, func() { r.members.Reach(joins) })
	}
}

// without has every operation go on without a rank.
func (r *round) without(rank int) {
	var all bool
	var last int
	var failed []agreement.Failure
	r.names.step(func(h *agreement.Home) {
		all, failed = h.Lose(rank)
		last = h.Latest()
	})
	r.tell(failed)
	r.transfer.Lose(rank)
	r.messages.Leave(rank)
	for _, t := range r.inUse() {
		if t.Kind.Splits() {
			for _, seq := range t.keys.WaitsFor(rank) {
				t.Fail(seq, units.FailUnsupported, fmt.Sprintf("rank %d has gone, and %v needs every rank of its process set", rank, t.Kind))
			}
		}
	}
	if r.leftRanks().Covers(r.all()) {
		r.desert()
	}
	if all {
		r.allJoined(last)
		return
	}
	r.updateMembership()
}

// outlastEvery is how often a server whose own worker has left looks whether another one needs it.
const outlastEvery = 100 * time.Millisecond

// Outlast waits until no worker needs the server in the running round: all have left, or none has a connection to it any more. The
// end of ctx ends the wait.
func (s *Server) Outlast(ctx context.Context) {
	r := s.running()
	if r == nil {
		return
	}
	look := time.NewTicker(outlastEvery)
	defer look.Stop()
	for len(r.connected()) > 0 {
		select {
		case <-look.C:
		case <-r.deserted:
			return
		case <-ctx.Done():
			return
		}
	}
}

// dismiss closes the connections of a lost rank, which hears why if it still runs.
func (r *round) dismiss(d membership.Departure) {
	r.mu.RLock()
	conns := append([]*conn(nil), r.conns[d.Number]...)
	r.mu.RUnlock()
	for _, c := range conns {
		c.sendJSON(wire.Header{Type: wire.TypeLost}, wire.Lost{Role: wire.RoleWorker, Rank: d.Number, Why: d.Notice()})
		c.goodbye()
		time.AfterFunc(outbox.LastWords, func() { _ = c.tc.Close() }) // where it reads nothing
	}
}
