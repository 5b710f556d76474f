package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// register handles a request to take part: in the next round, or again in one that runs.
func (m *Machine) register(l *line, c *wire.Control) {
	r := c.Register
	p := m.sessions[r.Node.Session]
	switch {
	case r.Node.Role != l.hello.Role || l.hello.Role == wire.RoleObserver:
		m.refuse(l, c.ID, fmt.Sprintf("a node that said hello as %s registers as %s", l.hello.Role, r.Node.Role))
	case r.Node.Session == 0:
		m.refuse(l, c.ID, "the registration has no session number")
	case l.peer != nil && l.peer != p:
		m.refuse(l, c.ID, fmt.Sprintf("this connection already belongs to %s", name(&l.peer.Node)))
	case r.Node.Role == wire.RoleServer:
		m.registerServer(l, c, p)
	case p != nil && p.round != nil:
		m.back(l, c, p)
	case p == nil && r.Known != nil:
		m.restore(l, c)
	default:
		m.registerWorker(l, c, p)
	}
}

// registerWorker puts a worker among those who wait for the next round. One that asks again, p, does
// not wait twice.
func (m *Machine) registerWorker(l *line, c *wire.Control, p *peer) {
	if p != nil {
		m.attach(l, p)
		m.waits(p, c)
		return
	}
	if why := m.objection(c.Register); why != "" {
		m.refusal = why
		m.refuse(l, c.ID, why)
		return
	}
	m.forming = append(m.forming, m.newPeer(l, c))
	m.form()
}

// registerServer puts a dedicated server into the pool, from which all further rounds take it.
func (m *Machine) registerServer(l *line, c *wire.Control, p *peer) {
	n := &c.Register.Node
	if p != nil {
		m.attach(l, p)
		m.waits(p, c)
		p.state = present
		if r := m.roundOf(l, 0); r != nil {
			m.seat(p, r)
		}
		m.form()
		return
	}
	if there := m.serverAt(n.Server); there != nil && there.line == nil {
		m.lose(there, "another process has taken its address")
	}
	if why := m.objectionToServer(n); why != "" {
		m.refuse(l, c.ID, why)
		return
	}
	m.pool = append(m.pool, m.newPeer(l, c))
	m.form()
}

// form starts a round when everybody is there.
func (m *Machine) form() {
	workers, dedicated := m.expected()
	servers := m.ready()
	if workers == 0 || len(m.forming) < workers || len(servers) < dedicated {
		return
	}
	for _, p := range slices.Clone(m.forming) { // registered before anybody said how many there are
		if p.Rank >= workers {
			m.refuse(p.line, p.asked, outOfRange(p.Rank, workers))
			m.forget(p)
		}
	}
	if len(m.forming) < workers {
		return
	}
	if dedicated > 0 {
		for _, p := range servers[dedicated:] {
			m.refuse(p.line, p.asked, tooManyServers(servers[:dedicated]))
			m.forget(p)
		}
		servers = servers[:dedicated]
	}
	r, err := newRound(m.roster(servers), m.placement())
	if err != nil {
		for _, p := range slices.Clone(m.forming) {
			m.refuse(p.line, p.asked, err.Error())
			m.forget(p)
		}
		return
	}
	m.start(r, servers)
}

// start opens a round: everybody gets the roster.
func (m *Machine) start(r *round, servers []*peer) {
	m.info("round %#x starts with %d workers and %d servers, %d of them dedicated",
		r.roster.Round, len(r.workers), len(r.roster.Servers), len(servers))
	m.rounds = append(m.rounds, r)
	_, m.dedicated = m.expected()
	m.next = r.roster.Round + 1
	for _, p := range servers { // first, so that they know the round when its workers come
		m.seat(p, r)
	}
	for _, p := range m.forming {
		r.workers[p.Rank] = p
		p.round = r
	}
	m.forming, m.refusal = nil, ""
	for _, p := range r.workers {
		m.seat(p, r)
	}
}

// seat tells a node the roster of a round that it is in.
func (m *Machine) seat(p *peer, r *round) {
	m.answer(p.line, p.asked, &wire.Control{Roster: &r.roster})
	p.asked, p.until = 0, 0
}

// roster makes the membership of the next round: embedded servers in the order of ranks, then the
// dedicated ones in the order of their addresses.
func (m *Machine) roster(dedicated []*peer) wire.Roster {
	roster := wire.Roster{Round: max(m.next, 1), Workers: make([]wire.Node, len(m.forming))}
	for _, p := range m.forming {
		roster.Workers[p.Rank] = p.Node
	}
	for _, n := range roster.Workers {
		if n.Server != "" {
			roster.Servers = append(roster.Servers, n)
		}
	}
	dedicated = slices.SortedFunc(slices.Values(dedicated), func(a, b *peer) int { return cmp.Compare(a.Server, b.Server) })
	for _, p := range dedicated {
		n := p.Node
		n.Rank = len(roster.Servers)
		roster.Servers = append(roster.Servers, n)
	}
	return roster
}

// expected is how many workers (0: not known yet) and at least how many dedicated servers make a round.
func (m *Machine) expected() (workers, dedicated int) {
	workers, dedicated = m.settings.Workers, m.settings.Dedicated
	for _, p := range m.forming {
		workers = cmp.Or(workers, p.wants.Workers)
		dedicated = cmp.Or(dedicated, p.wants.Dedicated)
	}
	return workers, dedicated
}

// placement is how keys are placed in the next round.
func (m *Machine) placement() string {
	for _, p := range m.forming {
		if p.wants.Placement != "" {
			return p.wants.Placement
		}
	}
	return m.settings.Placement
}

// ready lists the dedicated servers whose line is whole, in the order in which they came.
func (m *Machine) ready() []*peer {
	var there []*peer
	for _, p := range m.pool {
		if p.line != nil {
			there = append(there, p)
		}
	}
	return there
}

func (m *Machine) serverAt(address string) *peer {
	if i := slices.IndexFunc(m.pool, func(p *peer) bool { return p.Server == address }); i >= 0 {
		return m.pool[i]
	}
	return nil
}

// objection is why a worker cannot take part in the next round, "" if it can.
func (m *Machine) objection(r *wire.Register) string {
	if r.Workers < 0 || r.Workers > limits.MaxRanks || r.Dedicated < 0 || r.Dedicated > limits.MaxServers {
		return fmt.Sprintf("%s says the job has %d workers and %d dedicated servers; the limits are %d and %d",
			name(&r.Node), r.Workers, r.Dedicated, limits.MaxRanks, limits.MaxServers)
	}
	if s := m.settings.Workers; s != 0 && r.Workers != 0 && r.Workers != s {
		return fmt.Sprintf("%s says the job has %d workers, the scheduler was started for %d", name(&r.Node), r.Workers, s)
	}
	if s := m.settings.Dedicated; s != 0 && r.Dedicated != 0 && r.Dedicated != s {
		return fmt.Sprintf("%s waits for %d dedicated servers, the scheduler was started for %d", name(&r.Node), r.Dedicated, s)
	}
	if err := checkPlacement(r.Placement); err != nil {
		return err.Error()
	}
	for _, p := range m.forming {
		if why := disagree(p, r); why != "" {
			return why
		}
	}
	workers, _ := m.expected()
	if workers = cmp.Or(workers, r.Workers, limits.MaxRanks); r.Node.Rank < 0 || r.Node.Rank >= workers {
		return outOfRange(r.Node.Rank, workers)
	}
	return m.otherRelease(&r.Node)
}

// disagree says in what a new worker and one that waits cannot both be right.
func disagree(p *peer, r *wire.Register) string {
	w := &p.wants
	two := func(what string, x, y any) string {
		return fmt.Sprintf("workers disagree on %s: %s says %v, %s says %v", what, name(&p.Node), x, name(&r.Node), y)
	}
	switch differ := func(x, y int) bool { return x != 0 && y != 0 && x != y }; {
	case differ(w.Workers, r.Workers):
		return two("the number of workers", w.Workers, r.Workers)
	case differ(w.Dedicated, r.Dedicated):
		return two("the number of dedicated servers", w.Dedicated, r.Dedicated)
	case w.Placement != "" && r.Placement != "" && w.Placement != r.Placement:
		return two("the placement", w.Placement, r.Placement)
	case p.Rank == r.Node.Rank:
		return fmt.Sprintf("two workers have the same rank: %s and %s; give each worker its own RANK", name(&p.Node), name(&r.Node))
	}
	return ""
}

func (m *Machine) objectionToServer(n *wire.Node) string {
	_, dedicated := m.expected()
	dedicated = cmp.Or(dedicated, m.dedicated)
	ready := m.ready()
	there := m.serverAt(n.Server)
	switch {
	case n.Server == "":
		return "a dedicated server registers with the address at which workers reach it; this one has none"
	case there != nil:
		return fmt.Sprintf("two servers have the same address: %s and %s", name(&there.Node), name(n))
	case dedicated > 0 && len(ready) >= dedicated:
		return tooManyServers(ready[:dedicated])
	case len(m.pool) >= limits.MaxServers:
		return fmt.Sprintf("the job has %d servers, which is the limit", limits.MaxServers)
	}
	return m.otherRelease(n)
}

func (m *Machine) otherRelease(n *wire.Node) string {
	for _, p := range slices.Concat(m.forming, m.pool) {
		if p.Version != n.Version && p.line != nil {
			return fmt.Sprintf("%s runs release %q, %s runs %q: install the same release everywhere",
				name(n), n.Version, name(&p.Node), p.Version)
		}
	}
	return ""
}

func outOfRange(rank, workers int) string {
	return fmt.Sprintf("rank %d of %d workers: ranks go from 0 to %d", rank, workers, workers-1)
}

func tooManyServers(have []*peer) string {
	names := make([]string, 0, len(have))
	for _, p := range have {
		names = append(names, name(&p.Node))
	}
	return fmt.Sprintf("the job expects %d dedicated servers and has them: %s", len(have), strings.Join(names, ", "))
}

// missing says whom the next round waits for: "ranks 2, 3 of 4 and 1 of 2 servers".
func (m *Machine) missing() string {
	workers, dedicated := m.expected()
	if workers == 0 {
		return "a worker that knows how many workers the job has"
	}
	here := map[int]bool{}
	for _, p := range m.forming {
		here[p.Rank] = true
	}
	var ranks []int
	for rank := range workers {
		if !here[rank] {
			ranks = append(ranks, rank)
		}
	}
	var w, s string
	if len(ranks) > 0 {
		w = fmt.Sprintf("%s of %d", ranksOf(ranks), workers)
	}
	if lack := dedicated - len(m.ready()); lack > 0 {
		s = fmt.Sprintf("%d of %d servers", lack, dedicated)
	}
	text := both(w, s)
	if m.refusal != "" {
		text += "; a worker was refused: " + m.refusal
	}
	return text
}
