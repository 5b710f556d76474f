package scheduler

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// register handles a request to join the next round, or to rejoin a running one.
func (m *Machine) register(l *line, c *wire.Control) {
	r := c.Register
	p := m.sessions[r.Node.Session]
	switch {
	case r.Node.Role != l.hello.Role || l.hello.Role == wire.RoleObserver:
		m.refuse(l, c.ID, fmt.Sprintf("a node that said hello as %s registers as %s", l.hello.Role, r.Node.Role))
	case r.Node.Session == 0:
		m.refuse(l, c.ID, "the registration has no session number")
	case len(r.Node.Standby) > limits.MaxAddress:
		m.refuse(l, c.ID, fmt.Sprintf("the registration has an address of %d bytes, limit %d", len(r.Node.Standby), limits.MaxAddress))
	case r.Node.Addresses.Check() != nil:
		m.refuse(l, c.ID, fmt.Sprintf("the registration has %v", r.Node.Addresses.Check()))
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

// registerWorker adds a worker to those that wait for the next round. p is the same worker if it asks again.
func (m *Machine) registerWorker(l *line, c *wire.Control, p *peer) {
	if p != nil {
		m.attach(l, p)
		m.waits(p, c)
		return
	}
	if why, differs := m.objection(c.Register); why != "" {
		m.refusal = why
		m.refuse(l, c.ID, why)
		if differs && m.needs(c.Register) {
			m.dismiss(&c.Register.Node, why)
		}
		return
	}
	m.forming = append(m.forming, m.newPeer(l, c))
	m.gaveUp.Remove(c.Register.Node.Rank)
	m.form()
}

// needs reports whether the round that forms cannot do without a worker: it lacks one of that rank, and has a fixed size. Who comes with a rank that
// is taken, such as a process that was restarted before the end of the one before it was noticed, or is one too many, holds nobody.
func (m *Machine) needs(r *wire.Register) bool {
	taken := slices.ContainsFunc(m.forming, func(p *peer) bool { return p.Rank == r.Node.Rank })
	within := r.Node.Rank >= 0 && r.Node.Rank < cmp.Or(m.expectedWorkers(), limits.MaxRanks)
	return within && !taken && !r.Elastic && !m.says(isElastic).wants.Elastic && m.launcherRound == 0
}

// dismiss ends the wait of all workers for a round that cannot form, because one that it needs disagrees with them. Those that come later begin anew:
// they cannot be told from a job that was started again, with other settings.
func (m *Machine) dismiss(disagrees *wire.Node, why string) {
	for _, p := range slices.Clone(m.forming) {
		m.refuse(p.line, p.asked, fmt.Sprintf("the job cannot start, because %s was refused: %s", name(disagrees), why))
		m.forget(p)
	}
	m.refusal = why
}

// registerServer adds a dedicated server to the pool, which serves all further rounds.
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
	if gone := m.alreadyLost(n.Session); gone != nil {
		m.refuse(l, c.ID, fmt.Sprintf("%s: %v", name(n), gone))
		return
	}
	if there := m.serverAt(n.Addresses); there != nil && there.line == nil {
		m.declareLost(there, replaced)
	}
	if why := m.objectionToServer(c.Register); why != "" {
		m.refuse(l, c.ID, why)
		return
	}
	m.pool = append(m.pool, m.newPeer(l, c))
	m.form()
	m.takeIn()
}

// advance refuses the workers that wait for an earlier round of the launcher.
func (m *Machine) advance(to uint64) {
	m.launcherRound = to
	for _, p := range slices.Clone(m.forming) {
		if p.wants.LauncherRound != to {
			m.refuse(p.line, p.asked, otherRound(p.wants.LauncherRound, to))
			m.forget(p)
		}
	}
}

func otherRound(has, now uint64) string {
	return fmt.Sprintf("the processes of the job have changed: round %d comes after the round %d of this one", now, has)
}

// form starts a round when all nodes have come.
func (m *Machine) form() {
	workers := m.expectedWorkers()
	if workers == 0 || len(m.forming) < workers {
		return
	}
	dedicated, servers := m.expectedServers(), m.ready()
	elastic := m.says(isElastic).wants.Elastic
	if elastic && m.launcherRound > 1 { // it goes on with those that are left, and others may join
		dedicated = min(dedicated, 1)
	}
	if len(servers) < dedicated {
		return
	}
	for _, p := range slices.Clone(m.forming) { // registered before the number of workers was known
		if p.Rank >= workers {
			m.refuse(p.line, p.asked, outOfRange(p.Rank, workers))
			m.forget(p)
		}
	}
	if len(m.forming) < workers {
		return
	}
	if dedicated > 0 && !elastic {
		for _, p := range servers[dedicated:] {
			m.refuse(p.line, p.asked, tooManyServers(servers[:dedicated]))
			m.forget(p)
		}
		servers = servers[:dedicated]
	}
	r, err := m.found(servers)
	if err != nil {
		for _, p := range slices.Clone(m.forming) {
			m.refuse(p.line, p.asked, err.Error())
			m.forget(p)
		}
		return
	}
	m.start(r, servers)
}

// start opens a round and sends its roster to all nodes.
func (m *Machine) start(r *round, servers []*peer) {
	m.info("a round starts with %d workers and %d servers, %d of them dedicated", len(r.workers), len(r.epoch.Servers), len(servers))
	m.rounds = append(m.rounds, r)
	m.dedicated = m.expectedServers()
	m.next = r.epoch.Round + 1
	for _, p := range servers { // first, so that they know the round when its workers come
		m.seat(p, r)
	}
	for _, p := range m.forming {
		r.workers[p.Rank] = p
		p.round = r
	}
	m.forming, m.refusal = nil, ""
	m.gaveUp.Reset()
	for _, p := range r.workers {
		m.seat(p, r)
	}
	m.out = append(m.out, Output{News: &News{Began: r.in(present)}})
}

// seat sends a node the roster of its round.
func (m *Machine) seat(p *peer, r *round) {
	m.answer(p.line, p.asked, &wire.Control{Roster: r.rosterFor(p)})
	p.asked, p.until = 0, 0
}

// found makes the next round of the workers that wait and of dedicated servers.
func (m *Machine) found(servers []*peer) (*round, error) {
	workers := make([]membership.Node, len(m.forming))
	for _, p := range m.forming {
		workers[p.Rank] = control.NodeOf(&p.Node)
	}
	dedicated := each.Of(servers, func(p *peer) membership.Node { return control.NodeOf(&p.Node) })
	e, err := membership.Found(max(m.next, 1), m.placement(), workers, dedicated)
	if err != nil {
		return nil, err
	}
	e.Elastic = m.says(isElastic).wants.Elastic
	return newRound(e)
}

// expectedWorkers is how many workers make a round; 0: not known yet.
func (m *Machine) expectedWorkers() int {
	if m.settings.Workers != 0 {
		return m.settings.Workers
	}
	return m.says(knowsWorkers).wants.Workers
}

// expectedServers is how many dedicated servers a round waits for.
func (m *Machine) expectedServers() int {
	if m.settings.Dedicated != 0 {
		return m.settings.Dedicated
	}
	return m.says(knowsServers).wants.Dedicated
}

// placement is how keys are placed in the next round.
func (m *Machine) placement() string {
	return cmp.Or(m.says(knowsPlacement).wants.Placement, m.settings.Placement, placement.Default)
}

// says is the first waiting worker whose registration has a value; an empty peer where none has.
func (m *Machine) says(something func(*wire.Register) bool) *peer {
	for _, p := range m.forming {
		if something(&p.wants) {
			return p
		}
	}
	return &peer{}
}

// Values that a worker may state or leave to others.
func knowsWorkers(r *wire.Register) bool   { return r.Workers != 0 }
func knowsServers(r *wire.Register) bool   { return r.Dedicated != 0 }
func knowsPlacement(r *wire.Register) bool { return r.Placement != "" }
func isElastic(r *wire.Register) bool      { return r.Elastic }

// differ reports whether two values are both stated and different.
func differ[T comparable](a, b T) bool {
	var nothing T
	return a != nothing && b != nothing && a != b
}

// ready lists the dedicated servers whose line is whole, in the order in which they came.
func (m *Machine) ready() []*peer {
	return slices.DeleteFunc(slices.Clone(m.pool), func(p *peer) bool { return p.line == nil })
}

func (m *Machine) serverAt(at address.List) *peer {
	if i := slices.IndexFunc(m.pool, func(p *peer) bool { return p.Addresses.Shares(at) }); i >= 0 {
		return m.pool[i]
	}
	return nil
}

// objection is why a worker cannot join the next round, "" if it can, and whether it differs from the others in what has to agree.
func (m *Machine) objection(r *wire.Register) (why string, differs bool) {
	if r.Workers < 0 || r.Workers > limits.MaxRanks || r.Dedicated < 0 || r.Dedicated > limits.MaxServers {
		return fmt.Sprintf("%s says the job has %d workers and %d dedicated servers; the limits are %d and %d",
			name(&r.Node), r.Workers, r.Dedicated, limits.MaxRanks, limits.MaxServers), false
	}
	if r.LauncherRound != m.launcherRound {
		return otherRound(r.LauncherRound, m.launcherRound), false
	}
	if _, err := placement.Parse(r.Placement); err != nil {
		return err.Error(), false
	}
	if why := m.disagreement(r); why != "" {
		return why, true
	}
	for _, p := range m.forming {
		if p.Rank == r.Node.Rank {
			return fmt.Sprintf("two workers have the same rank: %s and %s; give each worker its own RANK", name(&p.Node), name(&r.Node)), false
		}
	}
	if workers := cmp.Or(m.expectedWorkers(), r.Workers, limits.MaxRanks); r.Node.Rank < 0 || r.Node.Rank >= workers {
		return outOfRange(r.Node.Rank, workers), false
	}
	return m.otherRelease(&r.Node), true
}

// disagreement is the first value in which a new worker differs from the scheduler, or from a node that has registered.
func (m *Machine) disagreement(r *wire.Register) string {
	if s := m.settings.Workers; s != 0 && r.Workers != 0 && r.Workers != s {
		return fmt.Sprintf("%s says the job has %d workers, the scheduler was started for %d", name(&r.Node), r.Workers, s)
	}
	if s := m.settings.Dedicated; s != 0 && r.Dedicated != 0 && r.Dedicated != s {
		return fmt.Sprintf("%s waits for %d dedicated servers, the scheduler was started for %d", name(&r.Node), r.Dedicated, s)
	}
	two := func(what string, p *peer, x, y any) string {
		return fmt.Sprintf("workers disagree on %s: %s says %v, %s says %v", what, name(&p.Node), x, name(&r.Node), y)
	}
	if p := m.says(knowsWorkers); differ(p.wants.Workers, r.Workers) {
		return two("the number of workers", p, p.wants.Workers, r.Workers)
	}
	if p := m.says(knowsServers); differ(p.wants.Dedicated, r.Dedicated) {
		return two("the number of dedicated servers", p, p.wants.Dedicated, r.Dedicated)
	}
	if p := m.says(knowsPlacement); differ(p.wants.Placement, r.Placement) {
		return two("the placement", p, p.wants.Placement, r.Placement)
	}
	return m.unlike(r, slices.Concat(m.forming, m.ready()))
}

// unlikeTimeouts is the ratio of peer timeouts up to which the ends of a line bear each other's silence. One end sends within three sweeps
// of its own timeout, and the other waits for 21 of its: idle lines end at seven.
const unlikeTimeouts = 4

// beatsUnlike refuses a new node whose lines to this process would end whenever nothing is said. What trains already goes on.
func (m *Machine) beatsUnlike(r *wire.Register) string {
	const setting = "PACELINE_PEER_TIMEOUT"
	own := m.settings.PeerTimeout
	other, err := time.ParseDuration(r.Alike[setting])
	if own == 0 || err != nil || r.Known != nil || max(own, other) <= unlikeTimeouts*min(own, other) {
		return ""
	}
	return fmt.Sprintf("%s is %v in the scheduler's process and %v on %s, and at most %d times as much is allowed: set it where paceline run or paceline scheduler is started, for all processes",
		setting, own, other, name(&r.Node), unlikeTimeouts)
}

// unlike is the first setting of which a new node and one that has registered state different values.
func (m *Machine) unlike(r *wire.Register, among []*peer) string {
	if why := m.beatsUnlike(r); why != "" {
		return why
	}
	for _, p := range among {
		for _, setting := range slices.Sorted(maps.Keys(r.Alike)) {
			if x, stated := p.wants.Alike[setting]; stated && x != r.Alike[setting] {
				return fmt.Sprintf("%s has to be the same everywhere: it is %q on %s and %q on %s",
					setting, x, name(&p.Node), r.Alike[setting], name(&r.Node))
			}
		}
	}
	return ""
}

func (m *Machine) objectionToServer(r *wire.Register) string {
	n := &r.Node
	dedicated := cmp.Or(m.expectedServers(), m.dedicated)
	ready := m.ready()
	there := m.serverAt(n.Addresses)
	switch {
	case len(n.Addresses) == 0:
		return "a dedicated server registers with the address at which workers reach it; this one has none"
	case there != nil:
		return fmt.Sprintf("two servers have the same address: %s and %s", name(&there.Node), name(n))
	case dedicated > 0 && len(ready) >= dedicated && !m.elastic(r):
		return tooManyServers(ready[:dedicated]) + "; an elastic job (paceline run --elastic, PACELINE_ELASTIC=1) takes in more, also while it runs"
	case len(m.pool) >= limits.MaxServers:
		return fmt.Sprintf("the job has %d servers, which is the limit", limits.MaxServers)
	}
	if m.elastic(r) { // a newer binary takes over from an older one: the handshake compares the versions of the protocol
		return m.unlike(r, slices.Concat(m.forming, ready, m.training()))
	}
	return cmp.Or(m.unlike(r, slices.Concat(m.forming, ready)), m.otherRelease(n))
}

// elastic reports whether a node that registers says, or others do, that the job is elastic.
func (m *Machine) elastic(r *wire.Register) bool {
	return r.Elastic || m.says(isElastic).wants.Elastic || len(m.training()) > 0
}

// training are the workers of an elastic job that runs.
func (m *Machine) training() []*peer {
	if len(m.rounds) == 0 || !m.rounds[len(m.rounds)-1].epoch.Elastic {
		return nil
	}
	return m.rounds[len(m.rounds)-1].workers
}

// otherRelease compares a node's release with that of the nodes that have registered, which all have the same.
func (m *Machine) otherRelease(n *wire.Node) string {
	servers := m.ready()
	if m.says(isElastic).wants.Elastic {
		servers = nil
	}
	for _, here := range [][]*peer{m.forming, servers} {
		if len(here) > 0 && here[0].Version != n.Version {
			p := &here[0].Node
			return fmt.Sprintf("%s runs release %q, %s runs %q: install the same release everywhere", name(n), n.Version, name(p), p.Version)
		}
	}
	return ""
}

func outOfRange(rank, workers int) string {
	return fmt.Sprintf("rank %d of %d workers: ranks go from 0 to %d", rank, workers, workers-1)
}

func tooManyServers(have []*peer) string {
	names := each.Of(have, func(p *peer) string { return name(&p.Node) })
	return fmt.Sprintf("the job expects %d dedicated servers and has them: %s", len(have), strings.Join(names, ", "))
}

// missing names the nodes that the next round waits for: "ranks 2, 3 of 4 and 1 of 2 servers".
func (m *Machine) missing() string {
	workers, dedicated := cmp.Or(m.expectedWorkers(), m.settings.Launched), m.expectedServers()
	if workers == 0 {
		return "a worker that knows how many workers the job has"
	}
	away := rankset.Range(workers).Minus(m.gaveUp)
	for _, p := range m.forming {
		away.Remove(p.Rank)
	}
	var w, s, g string
	if away.Len() > 0 {
		w = fmt.Sprintf("%s of %d", ranksOf(away.Ranks()), workers)
	}
	if lack := dedicated - len(m.ready()); lack > 0 {
		s = fmt.Sprintf("%d of %d servers", lack, dedicated)
	}
	if m.gaveUp.Len() > 0 {
		g = ranksOf(m.gaveUp.Ranks()) + ", which had come and gave up"
	}
	text := both(w, s, g)
	if m.refusal != "" {
		text += "; a worker was refused: " + m.refusal
	}
	return text
}

// here names the nodes that have come, by host: "ranks 0, 1 (host a), rank 2 (host b)".
func (m *Machine) here() string {
	ranks := map[string][]int{}
	for _, p := range m.forming {
		ranks[p.Host] = append(ranks[p.Host], p.Rank)
	}
	var parts []string
	for _, host := range slices.Sorted(maps.Keys(ranks)) {
		slices.Sort(ranks[host])
		parts = append(parts, fmt.Sprintf("%s (host %s)", ranksOf(ranks[host]), host))
	}
	for _, p := range m.ready() {
		parts = append(parts, name(&p.Node))
	}
	if len(parts) > mostNamed {
		parts = append(parts[:mostNamed], "others")
	}
	return strings.Join(parts, ", ")
}
