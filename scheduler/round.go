package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// round is one init to shutdown of all workers.
type round struct {
	epoch    *membership.Epoch
	roster   *wire.Roster       // the epoch as it travels; shared, not to be changed
	workers  []*peer            // by rank
	told     map[wire.Lost]bool // losses that all nodes were told of, without their reason
	parted   bool               // its workers were told that it cannot go on here, since one came back
	voters   rankset.Set        // workers that decide who is lost (majority.go)
	lastLoss uint32             // the epoch that began with the last loss of a worker
	settleBy time.Duration      // when it ends here unless enough voters know of all losses by then; 0 if they do, or it has
	learning bool               // restored: some workers are absent still
	held     []request          // that wait until these have reconnected
	fell     *peer              // restored: who had the scheduler before and fell silent with it
	young    time.Duration      // restored: until when all lines are younger than a silence that is noticed
	tensors  tensors
	sets     sets
	profiles profiles
}

// request is a message that is not answered yet.
type request struct {
	line *line
	msg  *wire.Control
}

func newRound(e *membership.Epoch) (*round, error) {
	dealer, err := membership.NewDealer(e)
	if err != nil {
		return nil, err
	}
	roster := control.RosterOf(e)
	r := &round{
		epoch: e, roster: &roster, told: map[wire.Lost]bool{}, workers: make([]*peer, len(e.Workers)),
		tensors: newTensors(dealer), sets: newSets(len(e.Workers)), voters: rankset.Range(len(e.Workers)), lastLoss: e.Number,
	}
	return r, nil
}

// server is the index of the dedicated server at some addresses, -1 if it is not in the round.
func (r *round) server(at address.List) int {
	return slices.IndexFunc(r.epoch.Servers, func(s membership.Server) bool {
		return s.Rank == membership.Dedicated && s.State != membership.Gone && s.Addresses.Shares(at)
	})
}

// in lists the ranks whose workers are in a state.
func (r *round) in(s state) []int { return r.ranks(func(p *peer) bool { return p.state == s }) }

// training lists those that are here and take part, and saidGoodbye those that do so no longer, whether their processes stay for the servers in them or not.
func (r *round) training() []int {
	return r.ranks(func(p *peer) bool { return p.state == present && !p.farewell })
}

func (r *round) saidGoodbye() []int {
	return r.ranks(func(p *peer) bool { return p.state == left || p.state == present && p.farewell })
}

func (r *round) ranks(are func(*peer) bool) []int {
	var ranks []int
	for rank, p := range r.workers {
		if are(p) {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// tell tells all nodes of a round of the loss of the node of that name, once.
func (m *Machine) tell(r *round, who string, gone wire.Lost) {
	gone.Round = r.epoch.Round
	key := gone
	key.Why = ""
	if r.told[key] {
		return
	}
	r.told[key] = true
	m.warn("the job has lost %s: %s", who, gone.Why)
	m.broadcast(r, &wire.Control{Lost: &gone})
}

// broadcast sends a message to all nodes of a round.
func (m *Machine) broadcast(r *round, c *wire.Control) {
	for _, p := range slices.Concat(r.workers, m.serversOf(r)) {
		if c.Roster == nil || p.state != lost { // who is not in the epoch needs no roster of it
			m.send(p.line, c)
		}
	}
}

// shrunk updates a round after a worker reconnected, left or was lost: with the last reconnection the held
// requests are handled, with the last departure the round ends.
func (m *Machine) shrunk(r *round) {
	if r.learning && len(r.in(absent)) == 0 {
		held := r.held
		r.learning, r.held = false, nil
		m.takeIn()
		for _, q := range held {
			if m.lines[q.line.id] == q.line {
				m.ask(q.line, q.msg)
			}
		}
	}
	if len(r.in(present))+len(r.in(absent)) > 0 {
		return
	}
	r.settleBy = 0
	for _, p := range r.workers {
		m.release(p)
	}
	m.rounds = slices.DeleteFunc(m.rounds, func(q *round) bool { return q == r })
	m.over = append(m.over[max(len(m.over)+1-limits.MaxRoundsOver, 0):], r.epoch.Round)
	m.info("the round of %d workers is over", len(r.workers))
}

// ask handles a request that belongs to a running round.
func (m *Machine) ask(l *line, c *wire.Control) {
	p := l.peer
	switch {
	case p == nil || p.Role != wire.RoleWorker || p.round == nil:
		m.refuse(l, c.ID, "only a worker can ask this, once the job has started")
	case p.state == lost:
		m.refuse(l, c.ID, p.round.givenUp(p))
	case p.round.learning:
		if len(p.round.held) >= limits.MaxHandles {
			m.refuse(l, c.ID, "too many requests wait until the workers have reconnected to the restarted scheduler")
			return
		}
		p.round.held = append(p.round.held, request{l, c})
	case len(c.Declare) > 0:
		m.declare(l, c)
	case len(c.FindSet) > 0:
		answer := p.round.find(c.FindSet)
		m.answer(l, c.ID, &answer)
	default:
		m.call(l, c)
	}
}

// back handles a worker that reconnects to a running round. A restarted scheduler learns the round from it.
func (m *Machine) back(l *line, c *wire.Control, p *peer) {
	r := c.Register
	if p.state == lost {
		m.refuse(l, c.ID, p.round.givenUp(p))
		return
	}
	m.attach(l, p)
	if r.Known != nil {
		p.round.learnSilence(r.Known.Silent)
		m.learnVotes(p.round, &r.Known.Votes)
		m.learnJoins(p.round, &r.Known.Roster)
		m.learnLosses(p.round, &r.Known.Roster)
		m.loseReplaced(p.round)
		p.farewell = p.farewell || r.Known.Farewell
	}
	if p.state == absent {
		if r.Known != nil {
			m.learn(p.round, r.Known)
		}
		if !r.More {
			p.state, p.over = present, false
		}
	}
	if !r.More {
		if p.farewell {
			m.without(p)
		}
		m.hurryAll(p.round)
		m.tellVotes(p.round, p)
		m.answer(l, c.ID, &wire.Control{Roster: p.round.roster})
		m.reopen(p.round)
		m.askWhoKnows(p.round)
		m.shrunk(p.round)
	}
}

// restore handles a worker of a round that this scheduler does not know.
func (m *Machine) restore(l *line, c *wire.Control) {
	n, known := &c.Register.Node, &c.Register.Known.Roster
	if slices.Contains(m.over, known.Round) {
		m.refuse(l, c.ID, fmt.Sprintf("%s comes back too late: the others have gone on without it, and their round is over", name(n)))
		return
	}
	if !slices.ContainsFunc(m.rounds, func(r *round) bool { return r.epoch.Round == known.Round }) {
		var r *round
		e, err := control.EpochOf(known)
		if err == nil {
			r, err = newRound(e)
		}
		if err != nil {
			m.refuse(l, c.ID, fmt.Sprintf("%s comes back with a bad roster: %v", name(n), err))
			return
		}
		m.expect(r)
	}
	p := m.sessions[n.Session]
	if p == nil || p.round == nil || p.Rank != n.Rank {
		m.refuse(l, c.ID, fmt.Sprintf("%s comes back to a round of which it is no worker any more", name(n)))
		return
	}
	m.back(l, c, p)
}

// givenUp is what a lost worker hears that comes back.
func (r *round) givenUp(p *peer) string {
	why := p.why
	var gone *membership.GoneError
	if errors.As(r.epoch.Return(membership.Member{Role: membership.WorkerRole, Number: p.Rank}, p.Session), &gone) {
		why = gone.Notice()
	}
	return fmt.Sprintf("the job has given up %s: %s", name(&p.Node), why)
}

// expect adds a restored round: its nodes are absent until they reconnect or their time is over. Those that have
// registered already, without knowing of the round, had not received its roster.
func (m *Machine) expect(r *round) {
	m.info("a round of %d workers is back: learning what it knows", len(r.workers))
	m.rounds = append(m.rounds, r)
	r.learning, r.young = true, m.now+m.settings.LostAfter/2
	due, why := m.comingBack()
	for rank, n := range r.roster.Workers {
		p := m.sessions[n.Session]
		if i := slices.Index(m.forming, p); p != nil && i >= 0 {
			m.forming = slices.Delete(m.forming, i, i+1)
			m.seat(p, r)
		} else {
			p = &peer{Node: n, state: absent, lostAt: due, why: why}
			m.sessions[n.Session] = p
		}
		if r.epoch.Workers[rank].State == membership.Gone {
			p.state, p.lostAt, p.why = lost, 0, "it was lost before the scheduler was restarted"
		}
		r.workers[rank], p.round = p, r
		if p.state == absent && r.moves() {
			m.probe(p)
		}
	}
	m.awaitServers(r, 0)
	if !r.epoch.Elastic { // it waited for as many as it has, and takes in no more
		m.dedicated = len(m.serversOf(r))
	}
}

// comingBack is until when nodes of a restored round have time to come back, and why one is lost that does not.
func (m *Machine) comingBack() (due time.Duration, why string) {
	return m.at(m.now + m.settings.LostAfter), fmt.Sprintf("did not come back within %s after the scheduler was restarted", seconds(m.settings.LostAfter))
}

// awaitServers expects the servers of a restored round, from an index on.
func (m *Machine) awaitServers(r *round, from int) {
	due, why := m.comingBack()
	for i, n := range r.roster.Servers {
		if i < from || n.Role != wire.RoleServer || r.epoch.Servers[i].State == membership.Gone {
			continue
		}
		if p := m.sessions[n.Session]; p != nil {
			m.seat(p, r)
			continue
		}
		p := &peer{Node: n, state: absent, lostAt: due, why: why}
		m.pool, m.sessions[n.Session] = append(m.pool, p), p
		m.probe(p)
	}
}

// loseReplaced has a restored round go on without servers at whose addresses others were started before a worker came back.
func (m *Machine) loseReplaced(r *round) {
	for _, p := range m.serversOf(r) {
		if p.state == absent && slices.ContainsFunc(m.pool, func(q *peer) bool { return q != p && q.Addresses.Shares(p.Addresses) }) {
			m.declareLost(p, replaced)
		}
	}
}

// replaced is why such a server is lost.
const replaced = "another process has its address now"
