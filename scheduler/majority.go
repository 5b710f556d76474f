package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Where workers hold standbys of the scheduler, a round may have two schedulers for some time: on both sides of a network that is parted, or after one
// was stopped, was given up and goes on. Only one of them may decide that a node is lost.
//
// A scheduler declares a node lost that is silent if more than half of the workers that vote have a line to it, or half of them with the lowest that votes. These are the
// live ones of the last epoch that as many of the voters before have said to know. Else a network that falls apart piece by piece could have both sides go on: this one with most of
// those whom it has left, the other with most of those who have not heard of that.
// It waits longer than the lines that one fault breaks take to end, so that it counts none of them as whole.
// A process whose host refuses a connection to its standby, or to a dedicated server, has ended: it is lost at once, and counts for no side, unless it fell silent before. Without the majority the round
// ends on this side, with an error on every worker, after the time in which nodes may come back.

// moves reports whether another scheduler may have the round.
func (r *round) moves() bool {
	return r.epoch.Elastic && slices.ContainsFunc(r.roster.Workers, func(n wire.Node) bool { return n.Standby != "" })
}

// poll counts the workers of a round that vote, and those of them that are here.
func (r *round) poll() (here, all int, rules bool) {
	return r.vote(func(p *peer) bool { return p.line != nil })
}

// vote counts the workers of a round that vote, and those of them that are there and for it.
func (r *round) vote(is func(*peer) bool) (yes, all int, rules bool) {
	lowest := false
	for rank, p := range r.workers {
		if !r.voters.Has(rank) {
			continue
		}
		votes := p.state == present && is(p)
		if all++; all == 1 {
			lowest = votes
		}
		if votes {
			yes++
		}
	}
	return yes, all, 2*yes > all || 2*yes == all && lowest
}

// askWhoKnows asks the workers of a round that moves whether they know its epoch. A client answers in turn, when it has the roster that was sent before.
func (m *Machine) askWhoKnows(r *round) {
	if !r.moves() || r.voters.Len() == len(r.in(present))+len(r.in(absent)) {
		return
	}
	for _, p := range r.workers {
		if p.state == present && p.line != nil && p.asksFor != r.epoch.Number {
			m.lastQuery++
			p.asksFor, p.askedFor = r.epoch.Number, m.lastQuery
			m.send(p.line, &wire.Control{Progress: &wire.Progress{Query: p.askedFor}})
		}
	}
}

// saysItKnows notes the answer. When enough voters know of the last loss, the live workers vote.
func (m *Machine) saysItKnows(p *peer) {
	p.knows, p.askedFor = p.asksFor, 0
	m.settleVoters(p.round)
}

// settleVoters is called when more workers know an epoch, or fewer vote.
func (m *Machine) settleVoters(r *round) {
	if _, _, enough := r.vote(func(p *peer) bool { return p.knows >= r.lastLoss }); enough && r.moves() {
		r.voters = rankset.Of(slices.Concat(r.in(present), r.in(absent))...)
		m.hurryAll(r)
	}
}

// roundThatMoves is the round of a node that another scheduler may have, nil for none.
func (m *Machine) roundThatMoves(p *peer) *round {
	for _, r := range m.rounds {
		if r.moves() && (p.round == r || p.Role == wire.RoleServer && r.server(p.Addresses) >= 0) {
			return r
		}
	}
	return nil
}

// grace is how long a node may have no line, to make another. One that fell silent would have done so before; but its line may be the first that has ended of those that
// one fault has struck.
func (m *Machine) grace(p *peer) time.Duration {
	moves := m.roundThatMoves(p) != nil
	switch {
	case moves && p.silent:
		return m.settling(p)
	case moves:
		return max(m.settings.Grace, m.settling(p))
	case p.silent:
		return min(m.settings.Grace, m.settling(p))
	}
	return m.settings.Grace
}

// settling is how long after the first of them all lines have ended that the fault has made silent which has struck a node: three or four sweeps of stream's watch, and one
// more. A silence that others notice soon after this scheduler began is older than all its lines: they need not settle. The node has a moment to come, if it runs and they are wrong; not
// the one that had the scheduler before, since those who come have heard its silence themselves.
func (m *Machine) settling(p *peer) time.Duration {
	sweeps := 5
	if r := m.roundThatMoves(p); r != nil && p.silent && p.state == absent && p.line == nil && m.now < r.young {
		if sweeps = 3; p == r.fell {
			sweeps = 0
		}
	}
	return m.settings.LostAfter * time.Duration(sweeps) / transport.SweepsPerTimeout
}

// hurry shortens the time in which a node may come back that has no line, and that others have lost too. Where this scheduler may not decide yet, hurryAll does it
// when it may.
func (m *Machine) hurry(p *peer, why string) {
	if r := m.roundThatMoves(p); r != nil {
		p.missed = why
		if _, _, rules := r.poll(); rules && p.lostAt > m.now+m.settling(p) {
			p.why, p.lostAt = why, m.at(m.now+m.settling(p))
		}
	}
}

// hurryAll is called when the number of workers has changed that have a line, or that vote.
func (m *Machine) hurryAll(r *round) {
	for _, p := range slices.Concat(r.workers, m.serversOf(r)) {
		if p.missed != "" && p.line == nil && (p.state == present || p.state == absent) {
			m.hurry(p, p.missed)
		}
	}
}

// probe asks whether a process has ended: a worker's by its standby, a dedicated server's by its own listener.
func (m *Machine) probe(p *peer) {
	at := p.Standby
	if p.Role == wire.RoleServer && m.roundThatMoves(p) != nil {
		at, _ = p.Addresses.Of("tcp")
	}
	if at != "" {
		m.out = append(m.out, Output{Probe: p.Session, Address: at})
	}
}

// learnSilence notes which worker had the scheduler of a restored round that has fallen silent: in rank 0, where it was not at a standby.
func (r *round) learnSilence(at string) {
	if at == "" || !r.moves() {
		return
	}
	led := r.workers[max(slices.IndexFunc(r.workers, func(p *peer) bool { return p.Standby == at }), 0)]
	if led.line == nil {
		led.silent, r.fell = true, led
	}
}

// ended handles the answer that a process has ended. Of a worker that fell silent before it says nothing: it may have gone on without those who are here, and have ended with the job.
func (m *Machine) ended(session uint64) {
	p := m.sessions[session]
	if p == nil || m.roundThatMoves(p) == nil || p.state == lost || p.state == left || p.silent && p.Role == wire.RoleWorker {
		return
	}
	if p.Role == wire.RoleWorker {
		p.round.voters.Remove(p.Rank)
	}
	why := "its process has ended"
	if p.why != "" && p.state == present {
		why = p.why
	}
	m.evict(p, why)
}

// undecided reports whether this scheduler may not decide, or not yet, that a node is lost.
func (m *Machine) undecided(p *peer, why string) bool {
	r := m.roundThatMoves(p)
	if r == nil || p.state == lost || p.state == left {
		return false
	}
	m.probe(p)
	here, live, rules := r.poll()
	switch {
	case p.line == nil && p.lostAt > m.now: // it may come back until then
		return true
	case rules:
		return false
	case p.line != nil:
	case !p.waited:
		p.waited, p.why, p.lostAt = true, why, m.at(m.now+m.settings.LostAfter)
	case !r.parted:
		r.parted = true
		gone := wire.Lost{Role: p.Role, Rank: p.Rank}
		if p.Role == wire.RoleServer {
			gone.Rank = r.server(p.Addresses)
		}
		gone.Why = fmt.Sprintf("%s; the job cannot go on here without it, because %d of %d workers have a line to this scheduler, and the others may have another one", why, here, live)
		m.tell(r, name(&p.Node), gone)
	}
	return true
}

// suspect has a worker with a whole line be lost after the grace time, which somebody has lost.
func (m *Machine) suspect(p *peer, why string) {
	if p.state == lost || p.state == left {
		return
	}
	m.probe(p)
	if p.lostAt == 0 {
		p.why, p.lostAt = why, m.at(m.now+max(m.settings.Grace, m.settling(p)))
	}
}
