package scheduler

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// goOn begins the epoch without a member that was lost, and without the server in its process, and reports whether the job goes on: it is
// elastic, and somebody is left to train and to serve. The error says what the job lacks.
func (m *Machine) goOn(r *round, lost membership.Loss, who string) (on bool, lack error) {
	worker := lost.Role == membership.WorkerRole
	if !r.epoch.Elastic || len(r.in(present))+len(r.in(absent)) == 0 {
		return false, nil
	}
	next, err := r.epoch.Next(membership.Change{Lose: []membership.Loss{lost}})
	if err != nil {
		return false, err
	}
	dealer, err := membership.NewDealer(next)
	if err != nil {
		return false, err
	}
	roster := control.RosterOf(next)
	r.epoch, r.roster, r.tensors.dealer = next, &roster, dealer
	for k, p := range r.tensors.placed {
		p.Servers = next.Keys.Of(p.ID).Servers
		r.tensors.placed[k] = p
	}
	if lost.Drained {
		m.info("epoch %d: the job goes on without %s, which was drained", next.Number, who)
	} else {
		m.warn("epoch %d: the job goes on without %s, which was lost: %s", next.Number, who, lost.Why)
	}
	if worker { // it ends, if it still runs
		m.send(r.workers[lost.Number].line, &wire.Control{Lost: &wire.Lost{Role: wire.RoleWorker, Rank: lost.Number, Round: next.Round, Why: lost.Why}})
	}
	m.broadcast(r, &wire.Control{Roster: r.roster})
	return true, nil
}

// loseServer has a round go on without a dedicated server, or end.
func (m *Machine) loseServer(r *round, index int, who, why string, drained bool) {
	on, lack := m.goOn(r, membership.Loss{Member: membership.Member{Role: membership.ServerRole, Number: index}, Drained: drained, Why: why}, who)
	if lack != nil {
		why = fmt.Sprintf("%s (%v)", why, lack)
	}
	if !on {
		m.tell(r, who, wire.Lost{Role: wire.RoleServer, Rank: index, Why: why})
	}
}

// accusedServer handles the word of a worker of an elastic job that it has lost a dedicated server.
func (m *Machine) accusedServer(r *round, index int, by *peer, why string) {
	s := &r.epoch.Servers[index]
	p := m.sessions[s.Incarnation]
	switch {
	case s.State == membership.Gone:
	case p == nil:
		m.loseServer(r, index, fmt.Sprintf("server %d (host %s, pid %d)", index, s.Host, s.PID), why, false)
	default:
		m.accused(p, by, why)
	}
}

// accused handles the word of a worker of an elastic job, or of the server in its process, that it has lost another process.
// If that one's own line is broken too, it is lost; else one of the two cannot reach the other, and it is judged after the grace time which.
func (m *Machine) accused(p, by *peer, why string) {
	switch {
	case p.state == lost || p.state == left:
	case p.line == nil:
		m.lose(p, why)
	default:
		if p.accusers == nil {
			p.accusers, p.judged = map[*peer]string{}, m.at(m.now+m.settings.Grace)
		}
		p.accusers[by] = why
	}
}

// judge decides on a process that runs and that some workers have lost: where they are more than half of those that train they go on
// without it, else the job goes on without them.
func (m *Machine) judge(p *peer) {
	accusers := p.accusers
	p.accusers, p.judged = nil, 0
	maps.DeleteFunc(accusers, func(w *peer, _ string) bool { return w.state != present })
	if p.state != present {
		return
	}
	for _, r := range m.rounds {
		if (r == p.round || r.server(p.Addresses) >= 0) && 2*len(accusers) > len(r.in(present)) {
			for _, why := range accusers {
				m.evict(p, why)
				return
			}
		}
	}
	for w, why := range accusers {
		m.lose(w, why)
	}
}

// evict has the job lose a process that may run. It hears why when its client comes back.
func (m *Machine) evict(p *peer, why string) {
	line := p.line
	m.lose(p, why)
	if line != nil {
		m.close(line)
	}
}

// alreadyLost is why a server that registers is one that the job goes on without, nil if it is not.
func (m *Machine) alreadyLost(session uint64) error {
	for _, r := range m.rounds {
		for i := range r.epoch.Servers {
			var gone *membership.GoneError
			if s := &r.epoch.Servers[i]; s.Incarnation == session && errors.As(r.epoch.Return(membership.Member{Role: membership.ServerRole, Number: i}, session), &gone) {
				return gone
			}
		}
	}
	return nil
}

// learnLosses records what a node of a restored round knows of its losses.
func (m *Machine) learnLosses(r *round, known *wire.Roster) {
	for _, l := range known.Gone {
		switch {
		case l.Role == wire.RoleWorker && l.Rank >= 0 && l.Rank < len(r.workers):
			m.lose(r.workers[l.Rank], l.Why)
		case l.Role == wire.RoleServer && l.Rank >= 0 && l.Rank < len(r.epoch.Servers) && r.epoch.Servers[l.Rank].State != membership.Gone:
			if p := m.sessions[r.epoch.Servers[l.Rank].Incarnation]; p != nil {
				p.empty = l.Drained
				m.evict(p, l.Why)
			}
		}
	}
}

// awaited are the ranks that a call on process sets still waits for. In an elastic round nobody waits for those that have gone.
func (r *round) awaited(k *call) []int {
	return slices.DeleteFunc(slices.Concat(r.in(present), r.in(absent)), func(rank int) bool { _, asked := k.asked[rank]; return asked })
}
