package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/wire"
)

// state is the state of a peer.
type state int

const (
	present state = iota // registered, though its line may be broken for the moment
	absent               // learned from others after a restart, has not reconnected yet
	left                 // said goodbye
	lost                 // ended without one
)

// peer is one worker or one dedicated server.
type peer struct {
	wire.Node
	wants wire.Register
	state state
	line  *line  // nil while its line is broken
	round *round // of a worker; nil while the round forms, and of a server

	asked uint64        // its register request, while it waits for a roster
	since time.Duration // when it asked
	until time.Duration // when the request is answered with an error, 0 never

	lostAt  time.Duration // its line is broken: when the job has lost it; 0 otherwise
	waited  bool          // longer than that, because this scheduler could not decide it
	silent  bool          // this scheduler or another node has found it silent, since it last came or was judged
	why     string        // its line broke because of this
	over    bool          // its process has ended
	came    bool          // it has had a line
	reached bool          // its standby has answered: if its host refuses a connection there, that is because the process has ended
	told    bool          // it was told to end on its line, because this scheduler may not decide that it is lost: a goodbye decides it
	missed  string        // others have lost it too, because of this; "" for none since its line broke

	accusers  []accuser     // of a process of an elastic job: others that have lost it
	judged    time.Duration // when it is decided whether it is lost, or they are; 0 where nobody has
	doubted   time.Duration // when the first of them came
	question  uint64        // that it was asked then; 0 when it has answered
	postponed bool          // it would be decided already, but for the answer

	knows    uint32 // the latest epoch that it has said to know, of a worker that votes
	asksFor  uint32 // the one that it was asked about last on its line, by the question of that number
	askedFor uint64

	farewell bool // a worker that has said goodbye to the servers, and stays for the one in its process

	empty    bool      // a server that has left empty
	among    int       // of one that was lost before the scheduler was restarted: membership.Loss.Among
	drainers []request // who waits for that
}

// newPeer makes the peer that registers by c on line l.
func (m *Machine) newPeer(l *line, c *wire.Control) *peer {
	r := c.Register
	p := &peer{Node: r.Node, wants: *r}
	p.wants.Known = nil
	m.sessions[p.Session] = p
	m.attach(l, p)
	m.waits(p, c)
	return p
}

// waits stores that p waits for a roster by request c.
func (m *Machine) waits(p *peer, c *wire.Control) {
	p.asked, p.since, p.until = c.ID, m.now, m.deadline(c)
}

// forget removes a worker that waits for a round, or a server.
func (m *Machine) forget(p *peer) {
	same := func(q *peer) bool { return q == p }
	m.forming = slices.DeleteFunc(m.forming, same)
	m.pool = slices.DeleteFunc(m.pool, same)
	if len(m.forming) == 0 {
		m.refusal = ""
		m.gaveUp.Reset()
	}
	m.release(p)
}

// giveUp forgets a worker that does not wait for the round any longer. The others hear that it had come: it is not the one
// that held them.
func (m *Machine) giveUp(p *peer) {
	m.gaveUp.Add(p.Rank)
	m.forget(p)
}

// release removes p from its line and from the sessions.
func (m *Machine) release(p *peer) {
	if p.line != nil {
		p.line.peer, p.line = nil, nil
	}
	if m.sessions[p.Session] == p {
		delete(m.sessions, p.Session)
	}
}

// leave handles a goodbye. A server that leaves in mid-round is a loss all the same.
func (m *Machine) leave(p *peer) {
	switch {
	case p.Role == wire.RoleServer:
		m.declareLost(p, "it was stopped")
	case p.round == nil:
		m.giveUp(p)
	case p.state == lost:
		p.line.peer, p.line = nil, nil
	case p.told:
		p.line.peer, p.line = nil, nil
		m.declareLost(p, p.why)
		m.settleLosses(p.round, []int{p.Rank})
	default:
		r := p.round
		p.state, p.lostAt = left, 0
		if r.voters.Remove(p.Rank) {
			m.settleIfKnown(r)
			m.tellSomeVotes(r)
		}
		m.release(p)
		m.without(p)
		m.shrunk(r)
	}
}

// without has a round go on without a worker that has said goodbye.
func (m *Machine) without(p *peer) {
	r := p.round
	r.profiles.forget(p.Rank)
	m.tellLeft(r)
	m.failCalls(r, p.Rank, fmt.Sprintf("rank %d has left the job", p.Rank))
}

// alone reports whether nobody waits for a worker: it is the last one of its round, with no server but its own, and the launcher beside it sees the end of its process.
func (m *Machine) alone(p *peer) bool {
	r := p.round
	return r != nil && !r.epoch.Elastic && m.settings.Beside && len(r.in(present))+len(r.in(absent)) == 1 && len(m.serversOf(r)) == 0
}

// lose declares p lost, where this scheduler may decide that.
func (m *Machine) lose(p *peer, why string) {
	if !m.undecided(p, why) {
		m.declareLost(p, why)
	}
}

// declareLost declares p lost. All nodes of its rounds hear of it: they end for it, or go on without it.
func (m *Machine) declareLost(p *peer, why string) {
	if p.state == lost || p.state == left {
		return
	}
	p.state, p.lostAt, p.why = lost, 0, why
	node := p.Node // for another goroutine
	if p.Role == wire.RoleServer {
		m.forget(p)
		m.info("%s has gone: %s", name(&p.Node), why)
		goesOn := false
		for _, r := range m.rounds {
			if i := r.server(p.Addresses); i >= 0 {
				goesOn = m.loseServer(r, i, name(&p.Node), membership.Loss{Drained: p.empty, Why: why, Among: p.among}) || goesOn
			}
		}
		if goesOn && !p.empty {
			m.out = append(m.out, Output{News: &News{Lost: &node}})
		}
		m.tellDrainers(p, why)
		if m.exit != nil && m.exit.peer == p && !p.empty {
			m.endExit()
		}
		return
	}
	m.out = append(m.out, Output{News: &News{Lost: &node, Round: p.wants.LauncherRound}})
	if on, _ := m.goOn(p.round, membership.Loss{Member: membership.Member{Role: membership.WorkerRole, Number: p.Rank}, Why: why, Among: p.among}, name(&p.Node)); !on {
		m.tell(p.round, name(&p.Node), wire.Lost{Role: wire.RoleWorker, Rank: p.Rank, Why: why})
	}
	p.round.profiles.forget(p.Rank)
	m.failCalls(p.round, p.Rank, fmt.Sprintf("%s was lost: %s", name(&p.Node), why))
	m.hurryAll(p.round)
	m.shrunk(p.round)
}

// reported handles a node's report that it lost a peer. It is passed on at once, also to that peer, which
// must learn that the others have given it up if it still runs.
func (m *Machine) reported(l *line, gone wire.Lost) {
	r := m.roundOf(l, gone.Round)
	if r == nil || r.epoch.Elastic && l.peer.state == lost { // the others have ended their connections to it
		return
	}
	by := " (reported by " + name(&l.peer.Node) + ")"
	if gone.Role == wire.RoleServer {
		if gone.Rank < 0 || gone.Rank >= len(r.epoch.Servers) {
			return
		}
		s := &r.epoch.Servers[gone.Rank]
		if s.Rank == membership.Dedicated && r.epoch.Elastic {
			m.accusedServer(r, gone.Rank, l.peer, gone.Why+by, gone.Silent)
			return
		}
		if s.Rank == membership.Dedicated {
			gone.Why += by
			m.tell(r, fmt.Sprintf("server %d (host %s, pid %d)", gone.Rank, s.Host, s.PID), gone)
			return
		}
		gone.Rank = s.Rank // an embedded server is lost with its worker
	}
	if gone.Rank < 0 || gone.Rank >= len(r.workers) {
		return
	}
	p := r.workers[gone.Rank]
	p.silent = p.silent || gone.Silent
	switch {
	case r.epoch.Elastic && l.peer != p && (l.peer.Role == wire.RoleServer || r.epoch.Embedded(l.peer.Rank) >= 0):
		m.accused(p, l.peer, gone.Why+by, gone.Silent)
	case r.moves() && p.line != nil && l.peer != p:
		m.suspect(p, gone.Why+by)
	default:
		m.lose(p, gone.Why+by)
	}
}

// roundOf finds the round in which the node on line l takes part; number 0 is its latest.
func (m *Machine) roundOf(l *line, number uint64) *round {
	switch p := l.peer; {
	case p == nil:
		return nil
	case p.Role == wire.RoleWorker:
		return p.round
	default:
		for _, r := range slices.Backward(m.rounds) {
			if (number == 0 || r.epoch.Round == number) && r.server(p.Addresses) >= 0 {
				return r
			}
		}
		return nil
	}
}

// name is what a node is called in messages: "rank 3 (host a, pid 12)".
func name(n *wire.Node) string {
	who := fmt.Sprintf("rank %d", n.Rank)
	if n.Role == wire.RoleServer {
		who = fmt.Sprintf("server at %v", n.Addresses)
	}
	return fmt.Sprintf("%s (host %s, pid %d)", who, n.Host, n.PID)
}

// mostNamed is how many ranks or hosts a message lists.
const mostNamed = 16

// ranksOf writes ranks in words: "rank 1", "ranks 2, 3"; a long list is cut.
func ranksOf(ranks []int) string {
	switch n := len(ranks); {
	case n == 1:
		return fmt.Sprintf("rank %d", ranks[0])
	case n > mostNamed:
		return fmt.Sprintf("ranks %s and %d more", rankset.Join(ranks[:mostNamed]), n-mostNamed)
	default:
		return "ranks " + rankset.Join(ranks)
	}
}

// both joins the texts that are not empty: "a", "a and b".
func both(parts ...string) string {
	return strings.Join(slices.DeleteFunc(parts, func(s string) bool { return s == "" }), " and ")
}
