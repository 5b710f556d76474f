package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// round is one init to shutdown of all workers.
type round struct {
	roster    wire.Roster
	placement string
	workers   []*peer            // by rank
	told      map[wire.Lost]bool // losses that everybody has heard of, without their reason
	learning  bool               // restored: some workers are absent still
	held      []request          // that wait until they are back
	tensors   tensors
	sets      sets
}

// request is a message that is not answered yet.
type request struct {
	line *line
	msg  *wire.Control
}

func newRound(roster wire.Roster, placement string) (*round, error) {
	if len(roster.Servers) == 0 {
		return nil, errors.New("the job has no server: no worker carries one (PACELINE_SERVERS=embedded or both) and no dedicated one was started (paceline server)")
	}
	t, err := newTensors(placement, roster.Servers)
	if err != nil {
		return nil, err
	}
	r := &round{roster: roster, placement: placement, told: map[wire.Lost]bool{}, tensors: t}
	r.workers = make([]*peer, len(roster.Workers))
	r.sets = newSets(len(roster.Workers))
	return r, nil
}

// server is the index of the dedicated server at an address, -1 if it takes no part.
func (r *round) server(address string) int {
	return slices.IndexFunc(r.roster.Servers, func(n wire.Node) bool {
		return n.Role == wire.RoleServer && n.Server == address
	})
}

// in lists the ranks whose workers are in a state.
func (r *round) in(s state) []int {
	var ranks []int
	for rank, p := range r.workers {
		if p.state == s {
			ranks = append(ranks, rank)
		}
	}
	return ranks
}

// tell tells all nodes of a round of a loss, once.
func (m *Machine) tell(r *round, gone wire.Lost) {
	gone.Round = r.roster.Round
	key := gone
	key.Why = ""
	if r.told[key] {
		return
	}
	r.told[key] = true
	m.warn("round %#x lost %s %d: %s", r.roster.Round, gone.Role, gone.Rank, gone.Why)
	for _, p := range r.workers {
		m.send(p.line, &wire.Control{Lost: &gone})
	}
	for _, p := range m.pool {
		if r.server(p.Server) >= 0 {
			m.send(p.line, &wire.Control{Lost: &gone})
		}
	}
}

// shrunk looks at a round again after a worker came back, left or was lost: the last one to come back
// lets the held requests through, the last one to go ends the round.
func (m *Machine) shrunk(r *round) {
	if r.learning && len(r.in(absent)) == 0 {
		held := r.held
		r.learning, r.held = false, nil
		for _, q := range held {
			if m.lines[q.line.id] == q.line {
				m.ask(q.line, q.msg)
			}
		}
	}
	if len(r.in(present))+len(r.in(absent)) > 0 {
		return
	}
	for _, p := range r.workers {
		m.release(p)
	}
	m.rounds = slices.DeleteFunc(m.rounds, func(q *round) bool { return q == r })
	m.info("round %#x is over", r.roster.Round)
}

// ask handles a request that belongs to a running round.
func (m *Machine) ask(l *line, c *wire.Control) {
	p := l.peer
	switch {
	case p == nil || p.Role != wire.RoleWorker || p.round == nil:
		m.refuse(l, c.ID, "only a worker can ask this, once the job has started")
	case p.round.learning:
		if len(p.round.held) >= limits.MaxHandles {
			m.refuse(l, c.ID, "too many requests wait for workers to come back to a restarted scheduler")
			return
		}
		p.round.held = append(p.round.held, request{l, c})
	case len(c.Declare) > 0:
		m.declare(l, c)
	default:
		m.call(l, c)
	}
}

// back handles the return of a worker to a running round: to a scheduler that knows it, or to one that
// was restarted and learns the round from it.
func (m *Machine) back(l *line, c *wire.Control, p *peer) {
	r := c.Register
	if p.state == lost {
		m.refuse(l, c.ID, fmt.Sprintf("the job has given up rank %d: %s", p.Rank, p.why))
		return
	}
	m.attach(l, p)
	if p.state == absent {
		if r.Known != nil {
			m.learn(p.round, r.Known)
		}
		if !r.More {
			p.state = present
		}
	}
	if !r.More {
		m.answer(l, c.ID, &wire.Control{Roster: &p.round.roster})
		m.shrunk(p.round)
	}
}

// restore handles a worker that was in a round which this scheduler does not know, or knows from
// others only.
func (m *Machine) restore(l *line, c *wire.Control) {
	reg := c.Register
	known := &reg.Known.Roster
	i := slices.IndexFunc(m.rounds, func(r *round) bool { return r.roster.Round == known.Round })
	if i < 0 {
		if err := checkRoster(known); err != nil {
			m.refuse(l, c.ID, fmt.Sprintf("%s comes back with a bad roster: %v", name(&reg.Node), err))
			return
		}
		r, err := newRound(*known, reg.Placement)
		if err != nil {
			m.refuse(l, c.ID, err.Error())
			return
		}
		i = len(m.rounds)
		m.rounds = append(m.rounds, r)
		m.expect(r)
	}
	r := m.rounds[i]
	if reg.Node.Rank < 0 || reg.Node.Rank >= len(r.workers) {
		m.refuse(l, c.ID, fmt.Sprintf("rank %d of %d workers: ranks go from 0 to %d", reg.Node.Rank, len(r.workers), len(r.workers)-1))
		return
	}
	p := r.workers[reg.Node.Rank]
	if p.state == present {
		m.refuse(l, c.ID, fmt.Sprintf("two workers say that they are %s and %s", name(&p.Node), name(&reg.Node)))
		return
	}
	if p.state == absent {
		p.session, p.Node = reg.Session, reg.Node
		m.sessions[p.session] = p
	}
	m.back(l, c, p)
}

// expect makes all nodes of a restored round absent, and gives them time to come back.
func (m *Machine) expect(r *round) {
	m.info("round %#x of %d workers is back: learning what it knows", r.roster.Round, len(r.workers))
	r.learning = true
	due := m.at(m.now + m.settings.LostAfter)
	why := fmt.Sprintf("did not come back within %s after the scheduler was restarted", seconds(m.settings.LostAfter))
	for rank, n := range r.roster.Workers {
		r.workers[rank] = &peer{Node: n, state: absent, round: r, lostAt: due, why: why}
	}
	for _, n := range r.roster.Servers {
		if n.Role == wire.RoleServer && m.serverAt(n.Server) == nil {
			m.pool = append(m.pool, &peer{Node: n, state: absent, lostAt: due, why: why})
		}
	}
}

// checkRoster reports the first thing that is wrong with a roster that a node remembers.
func checkRoster(r *wire.Roster) error {
	switch {
	case r.Round == 0 || len(r.Workers) == 0 || len(r.Servers) == 0:
		return fmt.Errorf("round %#x with %d workers and %d servers", r.Round, len(r.Workers), len(r.Servers))
	case len(r.Workers) > limits.MaxRanks || len(r.Servers) > limits.MaxServers:
		return fmt.Errorf("%d workers (limit %d) and %d servers (limit %d)", len(r.Workers), limits.MaxRanks, len(r.Servers), limits.MaxServers)
	}
	for rank, n := range r.Workers {
		if n.Rank != rank || n.Role != wire.RoleWorker {
			return fmt.Errorf("place %d holds %s %d", rank, n.Role, n.Rank)
		}
	}
	return nil
}

// status is what the machine knows, for people.
func (m *Machine) status() *wire.StatusReply {
	s := &wire.StatusReply{State: "forming", Uptime: m.now.Round(time.Millisecond).Seconds()}
	if n := len(m.rounds); n > 0 {
		r := m.rounds[n-1]
		s.State, s.Roster, s.Tensors = "running", &r.roster, len(r.tensors.placed)
		if away := r.in(absent); len(away) > 0 {
			s.Waiting = ranksOf(away) + " to come back"
		}
	}
	if len(m.rounds) == 0 || len(m.forming) > 0 {
		s.Waiting = both(s.Waiting, m.missing())
	}
	return s
}
