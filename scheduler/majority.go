package scheduler

import (
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Where workers hold standbys of the scheduler, a round may have two schedulers for some time: on both sides of a network that is parted, or after one
// was stopped, was given up and goes on. Only one of them may decide that a node is lost.
//
// A scheduler declares a node lost that is silent if more than half of the workers that vote, others than that node, have a line to it, or half of them with the lowest that votes.
// It waits longer than the lines that one fault breaks take to end, so that it counts none of them as whole.
//
// A loss is settled, and who was lost votes no more, when as many of the voters have said to know of it. Else a network that falls apart piece by piece could have both sides go on: this one with most of
// those whom it has left, the other with most of those who have not heard of that. Workers are told who votes no more, and tell a scheduler that takes over: any majority of the voters that
// somebody knows then has one among them who knows of all that was settled before (dynamic voting, Jajodia and Mutchler 1990).
//
// A process whose host refuses a connection to its standby, or to a dedicated server, has ended: it is lost at once, unless it fell silent before. It may have known of a loss that nobody else here knows,
// so it votes, against: but where all who are missing have ended, there is no other side. A worker that is to go and has a line is told to: its goodbye decides. Where a node cannot be declared lost, or its loss is not settled, the round ends on this side, with an error on
// every worker, after the time in which nodes may come back.

// moves reports whether another scheduler may have the round.
func (r *round) moves() bool {
	return r.epoch.Elastic && slices.ContainsFunc(r.roster.Workers, func(n wire.Node) bool { return n.Standby != "" })
}

// poll counts the workers of a round that vote, and those of them that are here.
func (r *round) poll() (here, all int, rules bool) {
	return r.vote(func(p *peer) bool { return p.line != nil })
}

// vote counts the workers of a round that vote, and those of them that are there and for it. These rule if they are most, or half with the lowest, or if all others have ended.
func (r *round) vote(is func(*peer) bool) (yes, all int, rules bool) {
	lowest, others := false, false
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
		} else if !p.over {
			others = true
		}
	}
	return yes, all, 2*yes > all || 2*yes == all && lowest || yes > 0 && !others
}

// askWhoKnows asks the workers of a round that moves whether they know its epoch. A client answers in turn, when it has the roster that was sent before.
func (m *Machine) askWhoKnows(r *round) {
	if !r.moves() || len(r.unsettled()) == 0 {
		return
	}
	if r.settleBy == 0 && !r.parted {
		r.settleBy = m.at(m.now + 2*m.settings.LostAfter)
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
	m.settleIfKnown(p.round)
}

// settleIfKnown is called when more workers know an epoch, or fewer vote.
func (m *Machine) settleIfKnown(r *round) {
	if _, _, enough := r.vote(func(p *peer) bool { return p.knows >= r.lastLoss }); enough && r.moves() {
		m.settleLosses(r, r.in(lost))
		m.hurryAll(r)
	}
}

// settleLosses has some workers not vote any more: enough voters know that they are lost.
func (m *Machine) settleLosses(r *round, ranks []int) {
	fewer := false
	for _, rank := range ranks {
		fewer = r.voters.Remove(rank) || fewer
	}
	if fewer {
		m.tellVotes(r, r.workers...)
	}
	if len(r.unsettled()) == 0 {
		r.settleBy = 0
	}
}

// unsettled are the ranks that are lost, and vote.
func (r *round) unsettled() []int {
	return slices.DeleteFunc(r.in(lost), func(rank int) bool { return !r.voters.Has(rank) })
}

// tellVotes tells workers who votes, for a scheduler that takes over.
func (m *Machine) tellVotes(r *round, to ...*peer) {
	if !r.moves() {
		return
	}
	votes := &wire.Votes{Settled: rankset.Range(len(r.workers)).Minus(r.voters).Ranks()}
	for rank, p := range r.workers {
		if p.over {
			votes.Ended = append(votes.Ended, rank)
		}
	}
	if len(votes.Settled)+len(votes.Ended) == 0 {
		return
	}
	for _, p := range to {
		if p.state == present {
			m.send(p.line, &wire.Control{Votes: votes})
		}
	}
}

// tellSomeVotes tells as many as hardly are lost at once. At the end of a job all leave, and each would hear of each.
func (m *Machine) tellSomeVotes(r *round) {
	there := r.in(present)
	m.tellVotes(r, each.Of(there[:min(3, len(there))], func(rank int) *peer { return r.workers[rank] })...)
}

// learnVotes records what a worker of a restored round knows of that.
func (m *Machine) learnVotes(r *round, known *wire.Votes) {
	news := false
	for _, rank := range known.Ended {
		if rank >= 0 && rank < len(r.workers) && !r.workers[rank].over && r.workers[rank].state != present {
			r.workers[rank].over, news = true, true
		}
	}
	if news {
		m.tellVotes(r, r.workers...)
	}
	m.settleLosses(r, known.Settled)
}

// endUnsettled ends a round whose losses too few voters know: the others may have another scheduler that knows nothing of them.
func (m *Machine) endUnsettled(r *round) {
	know, all, _ := r.vote(func(p *peer) bool { return p.knows >= r.lastLoss })
	p := r.workers[r.unsettled()[0]]
	m.endHere(r, wire.Lost{Role: wire.RoleWorker, Rank: p.Rank, Why: p.why}, p, fmt.Sprintf("%d of %d workers have said to know of that, and the others may go on without these", know, all))
}

// endHere ends a round that cannot go on without a node, on this side of the network.
func (m *Machine) endHere(r *round, gone wire.Lost, p *peer, because string) {
	r.settleBy, r.parted = 0, true
	gone.Round, gone.Why = r.epoch.Round, fmt.Sprintf("%s; the job cannot go on here without it, because %s", gone.Why, because)
	m.warn("the job has lost %s: %s", name(&p.Node), gone.Why)
	m.broadcast(r, &wire.Control{Lost: &gone})
}

// reopen has a round that had ended on this side wait again, for a worker that has come back: others may, who have not been told.
func (m *Machine) reopen(r *round) {
	if !r.parted {
		return
	}
	r.parted = false
	m.at(m.now)
	for _, p := range slices.Concat(r.workers, m.serversOf(r)) {
		p.waited = false
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

// reached notes that a process has answered a probe.
func (m *Machine) reached(session uint64) {
	if p := m.sessions[session]; p != nil {
		p.reached = true
	}
}

// ended handles the answer that a process has ended. It says nothing of one that has a line, or whose host refuses every connection, as a firewall or a translation of
// addresses may: a worker that came here has never answered then. Of a worker that fell silent before it says nothing: it may have gone on without those who are here, and have ended with the job.
func (m *Machine) ended(session uint64) {
	p := m.sessions[session]
	if p == nil || m.roundThatMoves(p) == nil || p.state == lost || p.state == left || p.line != nil || p.Role == wire.RoleWorker && (p.silent || p.came && !p.reached) {
		return
	}
	if p.Role == wire.RoleWorker {
		p.over = true
		m.tellVotes(p.round, p.round.workers...)
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
	here, live, rules := r.vote(func(q *peer) bool { return q.line != nil && q != p }) // its own line may break before it hears of it
	switch {
	case p.line == nil && p.lostAt > m.now: // it may come back until then
		return true
	case rules:
		return false
	case !p.waited:
		p.waited, p.why, p.lostAt = true, why, m.at(m.now+m.settings.LostAfter)
		if p.Role == wire.RoleWorker && p.line != nil { // its own word is needed, and it may give that
			p.told = true
			m.send(p.line, &wire.Control{Lost: &wire.Lost{Role: wire.RoleWorker, Rank: p.Rank, Round: r.epoch.Round, Why: why}})
		}
	case !r.parted:
		gone := wire.Lost{Role: p.Role, Rank: p.Rank, Why: why}
		if p.Role == wire.RoleServer {
			gone.Rank = r.server(p.Addresses)
		}
		m.endHere(r, gone, p, fmt.Sprintf("%d of %d workers have a line to this scheduler, and the others may have another one", here, live))
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
