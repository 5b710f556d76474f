package scheduler

import (
	"slices"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// goOn begins the epoch without a worker that was lost, and reports whether the job goes on: it is elastic, no key was in the
// worker's process, and somebody is left. No key moves, so that nobody has to agree on an iteration first (core/handover).
func (m *Machine) goOn(p *peer) bool {
	r := p.round
	if !r.epoch.Elastic || r.epoch.Embedded(p.Rank) >= 0 || len(r.in(present))+len(r.in(absent)) == 0 {
		return false
	}
	lost := membership.Loss{Member: membership.Member{Role: membership.WorkerRole, Number: p.Rank}, Why: p.why}
	next, err := r.epoch.Next(membership.Change{Lose: []membership.Loss{lost}})
	if err != nil {
		return false
	}
	dealer, err := membership.NewDealer(next)
	if err != nil {
		return false
	}
	roster := control.RosterOf(next)
	r.epoch, r.roster, r.tensors.dealer = next, &roster, dealer
	m.warn("epoch %d: the job goes on without %s, which was lost: %s", next.Number, name(&p.Node), p.why)
	m.send(p.line, &wire.Control{Lost: &wire.Lost{Role: wire.RoleWorker, Rank: p.Rank, Round: next.Round, Why: p.why}}) // it ends, if it still runs
	m.broadcast(r, &wire.Control{Roster: r.roster})
	return true
}

// learnLosses takes in what a node of a restored round knows of its losses.
func (m *Machine) learnLosses(r *round, known *wire.Roster) {
	for _, l := range known.Gone {
		if l.Role == wire.RoleWorker && l.Rank >= 0 && l.Rank < len(r.workers) {
			m.lose(r.workers[l.Rank], l.Why)
		}
	}
}

// awaited are the ranks that a call on process sets still waits for. In an elastic round nobody waits for those that have gone.
func (r *round) awaited(k *call) []int {
	return slices.DeleteFunc(slices.Concat(r.in(present), r.in(absent)), func(rank int) bool { _, asked := k.asked[rank]; return asked })
}
