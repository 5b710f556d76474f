package scheduler

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/transport"
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
	next, err := r.epoch.Next(membership.Change{Lose: []membership.Loss{lost}, Remap: r.remaps()})
	if err != nil {
		return false, err
	}
	if err := r.enter(next); err != nil {
		return false, err
	}
	if lost.Drained {
		m.info("epoch %d: the job goes on without %s, which was drained", next.Number, who)
	} else {
		m.warn("epoch %d: the job goes on without %s, which was lost: %s", next.Number, who, lost.Why)
	}
	if worker { // it ends, if it still runs
		p := r.workers[lost.Number]
		m.send(p.line, &wire.Control{Lost: &wire.Lost{Role: wire.RoleWorker, Rank: lost.Number, Round: next.Round, Why: r.givenUp(p)}})
	}
	m.broadcast(r, &wire.Control{Roster: r.roster})
	if worker {
		r.lastLoss = next.Number
		m.askWhoKnows(r)
	}
	return true, nil
}

// remaps reports whether the policy decides on all keys when members change. A restored round may not know all of them yet.
func (r *round) remaps() bool {
	policy, err := placement.Parse(r.epoch.Policy)
	return err == nil && policy.Remaps() && !r.learning
}

// enter goes on in the next epoch.
func (r *round) enter(next *membership.Epoch) error {
	dealer, err := membership.NewDealer(next)
	if err != nil {
		return err
	}
	roster := control.RosterOf(next)
	r.epoch, r.roster, r.tensors.dealer = next, &roster, dealer
	for _, rank := range r.in(present) {
		r.profiles.moving.Add(rank)
	}
	for k, p := range r.tensors.placed {
		p.Servers = next.Keys.Of(p.ID).Servers
		r.tensors.placed[k] = p
	}
	return nil
}

// takeIn has the running rounds of an elastic job go on with the servers that have come since (decision 86). A restored round waits until its workers have said
// whom they know.
func (m *Machine) takeIn() {
	if len(m.rounds) == 0 {
		return
	}
	r := m.rounds[len(m.rounds)-1]
	if !r.epoch.Elastic || r.learning || len(r.saidGoodbye()) > 0 { // the next round takes them
		return
	}
	for _, p := range m.ready() {
		if r.server(p.Addresses) >= 0 {
			continue
		}
		before := r.epoch
		next, err := before.Next(membership.Change{Servers: []membership.Node{control.NodeOf(&p.Node)}, Remap: true})
		if err == nil {
			err = r.enter(next)
		}
		if err != nil {
			m.warn("%s cannot join the job: %v", name(&p.Node), err)
			continue
		}
		m.info("epoch %d: %s has joined the job; %d of the keys in use move", next.Number, name(&p.Node), len(membership.Moves(before, next)))
		m.seat(p, r)
		m.broadcast(r, &wire.Control{Roster: r.roster})
	}
}

// rosterFor is the roster as a node is to know it. To a server that has joined a rank may never have said goodbye.
func (r *round) rosterFor(p *peer) *wire.Roster {
	if p.Role != wire.RoleServer || r.server(p.Addresses) < r.epoch.Founders() {
		return r.roster
	}
	roster := *r.roster
	roster.Left = r.saidGoodbye()
	return &roster
}

// tellLeft tells the servers that have joined who has said goodbye.
func (m *Machine) tellLeft(r *round) {
	for _, p := range m.serversOf(r) {
		if roster := r.rosterFor(p); len(roster.Left) > 0 {
			m.send(p.line, &wire.Control{Roster: roster})
		}
	}
}

// learnJoins has a restored round have the servers that a node knows to have joined it.
func (m *Machine) learnJoins(r *round, known *wire.Roster) {
	have, moved := len(r.epoch.Servers), control.MovedOf(known)
	same := func(n wire.Node, s membership.Server) bool { return n.Session == s.Incarnation }
	if !r.epoch.Elastic || len(known.Servers) < have || !slices.EqualFunc(known.Servers[:have], r.epoch.Servers, same) {
		return
	}
	if len(known.Servers) == have && moved.Times() <= r.epoch.Moved().Times() {
		return
	}
	next, err := r.epoch.Next(membership.Change{Servers: each.Of(known.Servers[have:], func(n wire.Node) membership.Node { return control.NodeOf(&n) }), Moved: moved})
	if err == nil {
		err = r.enter(next)
	}
	if err != nil {
		m.warn("a node comes back with servers that cannot have joined, or keys that cannot have moved: %v", err)
		return
	}
	m.awaitServers(r, have)
	m.broadcast(r, &wire.Control{Roster: r.roster})
}

// loseServer has a round go on without a dedicated server, or end. It reports whether the round goes on.
func (m *Machine) loseServer(r *round, index int, who string, l membership.Loss) bool {
	l.Member = membership.Member{Role: membership.ServerRole, Number: index}
	why := l.Why
	on, lack := m.goOn(r, l, who)
	if lack != nil {
		why = fmt.Sprintf("%s (%v)", why, lack)
	}
	if !on {
		m.tell(r, who, wire.Lost{Role: wire.RoleServer, Rank: index, Why: why})
	}
	return on
}

// accusedServer handles the word of a worker of an elastic job that it has lost a dedicated server.
func (m *Machine) accusedServer(r *round, index int, by *peer, why string, silent bool) {
	s := &r.epoch.Servers[index]
	p := m.sessions[s.Incarnation]
	switch {
	case s.State == membership.Gone:
	case p == nil:
		m.loseServer(r, index, fmt.Sprintf("server %d (host %s, pid %d)", index, s.Host, s.PID), membership.Loss{Why: why})
	default:
		p.silent = p.silent || silent
		m.accused(p, by, why, silent)
	}
}

// accuser is a process that has lost another one, and why.
type accuser struct {
	peer *peer
	why  string
}

// accused handles the word of a process of an elastic job that it has lost another one.
// If that one's own line is broken too, it is lost; else one of the two cannot reach the other, and it is judged which, after the time in which
// all have noticed that one of them is silent, or where its connection was closed, after the grace time.
func (m *Machine) accused(p, by *peer, why string, silent bool) {
	switch {
	case p.state == lost || p.state == left:
	case p.line == nil:
		m.hurry(p, why)
		m.lose(p, why)
	default:
		judged := m.at(m.now + m.judging()) // its own line is silent too within the time, if it is the one
		if !silent {
			judged = m.at(m.now + max(m.settings.Grace, m.judging()))
		}
		switch {
		case p.accusers == nil:
			m.lastQuery++
			p.judged, p.doubted, p.question, p.postponed = judged, m.now, m.lastQuery, false
			m.send(p.line, &wire.Control{Progress: &wire.Progress{Query: p.question}}) // it answers, if it runs
		case silent, p.postponed: // those who have lost it may be most of them now
			p.judged = min(p.judged, judged)
		}
		if i := slices.IndexFunc(p.accusers, func(a accuser) bool { return a.peer == by }); i >= 0 {
			p.accusers[i].why = why
		} else {
			p.accusers = append(p.accusers, accuser{by, why})
		}
		m.probe(p)
	}
}

// judging is the time in which all lines and connections have ended that one fault has made silent, with a sweep of stream's watch to spare.
func (m *Machine) judging() time.Duration {
	return m.settings.LostAfter * 6 / transport.SweepsPerTimeout
}

// judge decides on a process that runs and that some workers have lost: where they are more than half of those that train they go on
// without it, else the job goes on without them, if it has answered since, or has not within the peer timeout: a node that was cut off itself shortly before notices a silence before others do. The last server
// goes only if nobody that trains reaches it. The word of dedicated servers counts if
// they are there still, and no worker says otherwise: a server that was stopped and goes on finds that its workers have closed their connections, and is lost itself.
func (m *Machine) judge(p *peer) {
	accusers, silent := p.accusers, p.silent
	p.accusers, p.judged, p.silent = nil, 0, false // its line is whole
	accusers = slices.DeleteFunc(accusers, func(a accuser) bool { return a.peer.state != present })
	if p.state != present || len(accusers) == 0 {
		return
	}
	first := accusers[0]
	accusers = slices.DeleteFunc(accusers, func(a accuser) bool { return a.peer.Role == wire.RoleServer })
	if len(accusers) == 0 {
		m.lose(p, first.why)
		return
	}
	training := len(slices.DeleteFunc(slices.Clone(accusers), func(a accuser) bool { return a.peer.farewell }))
	for _, r := range m.rounds {
		if all := len(r.training()); (r == p.round || r.server(p.Addresses) >= 0) && 2*training > all && (training == all || !r.hangsOn(p)) {
			if why := accusers[0].why; !m.undecided(p, why) {
				m.evict(p, why)
			}
			return
		}
	}
	if until := p.doubted + m.settings.LostAfter; p.question != 0 && m.now < until {
		p.accusers, p.judged, p.silent, p.postponed = accusers, m.at(until), silent, true
		return
	}
	for _, a := range accusers {
		m.lose(a.peer, a.why)
	}
}

// hangsOn reports whether no server of a round is left but the one in p's process. One that is leaving would stay.
func (r *round) hangsOn(p *peer) bool {
	return !slices.ContainsFunc(r.epoch.Servers, func(s membership.Server) bool { return s.State != membership.Gone && s.Incarnation != p.Session })
}

// answered notes that a process runs which others may have lost; where its answer alone was missing, it is judged now.
func (m *Machine) answered(p *peer) {
	if p.question = 0; p.postponed && p.accusers != nil {
		p.postponed, p.judged = false, m.at(m.now)
	}
}

// evict has the job lose a process that may run. It hears why when its client comes back.
func (m *Machine) evict(p *peer, why string) {
	line := p.line
	m.declareLost(p, why)
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
			r.workers[l.Rank].among = l.Among
			m.declareLost(r.workers[l.Rank], l.Why)
		case l.Role == wire.RoleServer && l.Rank >= 0 && l.Rank < len(r.epoch.Servers) && r.epoch.Servers[l.Rank].State != membership.Gone:
			if p := m.sessions[r.epoch.Servers[l.Rank].Incarnation]; p != nil {
				p.empty, p.among = l.Drained, l.Among
				m.evict(p, l.Why)
			}
		}
	}
}

// awaited are the ranks that a call on process sets still waits for. In an elastic round nobody waits for those that have gone.
func (r *round) awaited(k *call) []int {
	return slices.DeleteFunc(slices.Concat(r.training(), r.in(absent)), func(rank int) bool { _, asked := k.asked[rank]; return asked })
}
