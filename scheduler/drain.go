package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport/wire"
)

// A dedicated server leaves an elastic job empty (decision 84): somebody asks for it, or the server itself was told to end. The server asks
// whether it may, answers what only it can answer, says goodbye to the workers and that it is empty. Then its keys go on as those of a lost
// server do, and its line ends when all workers have closed their connections to it. Until then no other one may leave: ranks would be at
// three servers of a key, and one that is lost could leave its result at one of them alone.

// exit is the way out of a server.
type exit struct {
	peer *peer
	line *line // on which it said that it is empty; nil before
}

// drain handles the question of an observer, who waits until the server has left, or of the server.
func (m *Machine) drain(l *line, c *wire.Control) {
	p := l.peer
	switch {
	case p == nil:
		m.askedToDrain(l, c)
	case p.Role != wire.RoleServer:
		m.refuse(l, c.ID, "only a dedicated server can leave so")
	case c.Drain.Empty:
		m.emptied(l, c)
	case m.exit != nil && m.exit.peer == p && m.exit.line == nil: // it has not heard that it may, because its line broke or it had given up asking
		m.answer(l, c.ID, &wire.Control{Drain: &wire.Drain{}})
	default:
		m.exits = slices.DeleteFunc(m.exits, func(q request) bool { return q.line == l }) // it waits for the answer to that no longer
		m.exits = append(m.exits, request{l, c})
		m.nextExit()
	}
}

// askedToDrain tells a server that somebody wants it to leave.
func (m *Machine) askedToDrain(l *line, c *wire.Control) {
	r, p, err := m.meant(c.Drain.Server)
	if err == nil && p == nil { // it was drained before: who asks has what he wants
		m.answer(l, c.ID, &wire.Control{Drain: &wire.Drain{}})
		return
	}
	if err == nil {
		err = m.mayLeave(r, p)
	}
	if err != nil {
		m.refuse(l, c.ID, err.Error())
		return
	}
	p.drainers = append(p.drainers, request{l, c})
	m.send(p.line, &wire.Control{Drain: &wire.Drain{}})
}

// nextExit lets the next server leave that is to, if none is leaving.
func (m *Machine) nextExit() {
	for m.exit == nil && len(m.exits) > 0 {
		q := m.exits[0]
		m.exits = m.exits[1:]
		p := q.line.peer
		if m.lines[q.line.id] != q.line || p == nil {
			continue
		}
		r := m.roundOf(q.line, 0)
		err := fmt.Errorf("%s is in no job that runs", name(&p.Node))
		if r != nil {
			err = m.mayLeave(r, p)
		}
		if err != nil {
			m.refuse(q.line, q.msg.ID, err.Error())
			m.tellDrainers(p, err.Error())
			continue
		}
		m.exit = &exit{peer: p}
		m.info("%s is being drained", name(&p.Node))
		m.answer(q.line, q.msg.ID, &wire.Control{Drain: &wire.Drain{}})
	}
}

// emptied has the job go on without a server that is empty. A scheduler that was restarted meanwhile has not let it leave.
func (m *Machine) emptied(l *line, c *wire.Control) {
	m.exit = &exit{l.peer, l}
	l.peer.empty = true
	m.declareLost(l.peer, "it was drained")
	m.answer(l, c.ID, &wire.Control{Drain: &wire.Drain{}})
}

// exited lets the next server leave where the line was that of the last one, which all workers have left.
func (m *Machine) exited(l *line) {
	if m.exit != nil && m.exit.line == l {
		m.endExit()
	}
}

func (m *Machine) endExit() {
	m.exit = nil
	m.nextExit()
}

// meant finds the server that somebody means, and its round; no peer where it was drained.
func (m *Machine) meant(server string) (*round, *peer, error) {
	if len(m.rounds) == 0 {
		return nil, nil, errors.New("the job has not started, or is over: there is nothing to drain")
	}
	r := m.rounds[len(m.rounds)-1]
	var there []string
	var gone *membership.GoneError
	for i := range r.epoch.Servers {
		s := &r.epoch.Servers[i]
		if s.Rank != membership.Dedicated {
			continue
		}
		means := strconv.Itoa(i) == server || slices.ContainsFunc(s.Addresses, func(a address.Address) bool { return a.At == server })
		if s.State == membership.Gone {
			if means {
				errors.As(r.epoch.Return(membership.Member{Role: membership.ServerRole, Number: i}, s.Incarnation), &gone)
			}
			continue
		}
		if p := m.serverAt(s.Addresses); p != nil && means {
			return r, p, nil
		}
		there = append(there, fmt.Sprintf("%d (%v, host %s)", i, s.Addresses, s.Host))
	}
	switch {
	case gone != nil && gone.Drained:
		return r, nil, nil
	case gone != nil:
		return nil, nil, fmt.Errorf("%v has gone already: %s", gone.Member, gone.Notice())
	case len(there) == 0:
		return nil, nil, errors.New("the job has no dedicated server: those in its workers leave with them")
	}
	return nil, nil, fmt.Errorf("the job has no dedicated server %q: it has %s", server, strings.Join(there, ", "))
}

// mayLeave is why a server cannot leave, nil if it can.
func (m *Machine) mayLeave(r *round, p *peer) error {
	others := slices.DeleteFunc(m.serversOf(r), func(other *peer) bool {
		return other == p || other.line == nil || m.exit != nil && m.exit.peer == other
	})
	switch {
	case !r.epoch.Elastic:
		return fmt.Errorf("%s cannot be drained: the job is not elastic (paceline run --elastic, PACELINE_ELASTIC=1)", name(&p.Node))
	case p.line == nil:
		return fmt.Errorf("%s has no line to the scheduler at present (%s)", name(&p.Node), p.why)
	case len(others) == 0 && !r.embeds():
		return fmt.Errorf("%s is the last server of the job that stays, and cannot be drained: start another one first, by paceline server", name(&p.Node))
	}
	return nil
}

// embeds reports whether a worker that is here has a server in its process.
func (r *round) embeds() bool {
	return slices.ContainsFunc(r.epoch.Servers, func(s membership.Server) bool {
		return s.Rank != membership.Dedicated && s.State == membership.Live && r.workers[s.Rank].state == present
	})
}

// tellDrainers answers all who wait for a server to leave.
func (m *Machine) tellDrainers(p *peer, why string) {
	for _, q := range p.drainers {
		switch {
		case m.lines[q.line.id] != q.line: // who has asked waits no longer
		case p.empty:
			m.answer(q.line, q.msg.ID, &wire.Control{Drain: &wire.Drain{}})
		default:
			m.refuse(q.line, q.msg.ID, fmt.Sprintf("%s was not drained: %s", name(&p.Node), why))
		}
	}
	p.drainers = nil
}
