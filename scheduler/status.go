package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// query asks the nodes of a round for reports, for an observer who wants to know how far they are. Nodes report when
// somebody asks, and only then.
type query struct {
	line    *line // the observer's
	id      uint64
	number  uint64
	round   *round
	until   time.Duration // when it is answered at the latest, with the reports that have come
	missing map[*peer]bool
	reports map[*peer]*wire.Progress
}

// reportWait is how long an observer waits for the reports of nodes.
const reportWait = time.Second

// asked handles an observer's question for the status.
func (m *Machine) asked(l *line, c *wire.Control) {
	if !c.Status.Detail || len(m.rounds) == 0 {
		m.answer(l, c.ID, &wire.Control{Status: m.status()})
		return
	}
	if len(m.queries) >= limits.MaxQueries {
		m.refuse(l, c.ID, "too many ask for the status at the same time")
		return
	}
	m.lastQuery++
	q := &query{
		line: l, id: c.ID, number: m.lastQuery, round: m.rounds[len(m.rounds)-1], until: m.at(m.now + reportWait),
		missing: map[*peer]bool{}, reports: map[*peer]*wire.Progress{},
	}
	question := &wire.Control{Progress: &wire.Progress{Query: q.number}}
	for _, p := range slices.Concat(q.round.workers, m.serversOf(q.round)) {
		if p != nil && p.state == present && p.line != nil {
			q.missing[p] = true
			m.send(p.line, question)
		}
	}
	m.queries = append(m.queries, q)
	m.settle(q)
}

// reports takes a node's report in, and answers whoever waited for it alone.
func (m *Machine) reports(l *line, r *wire.Progress) {
	if p := l.peer; p != nil && p.question != 0 && p.question == r.Query {
		m.answered(p)
		return
	}
	if p := l.peer; p != nil && p.askedFor != 0 && p.askedFor == r.Query {
		m.saysItKnows(p)
		return
	}
	for _, q := range m.queries {
		if q.number == r.Query && q.missing[l.peer] {
			delete(q.missing, l.peer)
			r.Waits = r.Waits[:min(len(r.Waits), wire.MaxWaits)]
			q.reports[l.peer] = r
			m.settle(q)
			return
		}
	}
}

// settle answers a query to which every report has come, or whose time is over.
func (m *Machine) settle(q *query) {
	if len(q.missing) > 0 && m.now < q.until {
		return
	}
	m.queries = slices.DeleteFunc(m.queries, func(other *query) bool { return other == q })
	if m.lines[q.line.id] != q.line {
		return
	}
	s := m.status()
	if s.Roster == q.round.roster {
		s.Nodes, s.Shares = m.progress(q), sharesOf(q.round.epoch)
		s.Profiles, s.Verdict = q.round.profiles.shown(s.Shares), q.round.profiles.verdict
	}
	m.answer(q.line, q.id, &wire.Control{Status: s})
}

// sharesOf counts what each server has of the keys.
func sharesOf(e *membership.Epoch) []wire.Share {
	shares := make([]wire.Share, len(e.Servers))
	for t := range e.Keys.Each() {
		for part, server := range t.Servers {
			shares[server].Keys++
			shares[server].Bytes += uint64(t.Parts[part])
		}
	}
	return shares
}

// expireQueries answers the queries whose time is over.
func (m *Machine) expireQueries() {
	for _, q := range slices.Clone(m.queries) {
		if m.due(q.until) {
			m.settle(q)
		}
	}
}

// progress lists the nodes of a query's round.
func (m *Machine) progress(q *query) []wire.NodeStatus {
	var all []wire.NodeStatus
	for rank, p := range q.round.workers {
		all = append(all, q.of(p, wire.RoleWorker, rank))
	}
	there := m.serversOf(q.round)
	for i, s := range q.round.epoch.Servers {
		if s.Rank != membership.Dedicated {
			continue
		}
		at := slices.IndexFunc(there, func(p *peer) bool { return p.Addresses.Shares(s.Addresses) })
		if at < 0 {
			all = append(all, wire.NodeStatus{Role: wire.RoleServer, Rank: i, State: stateNames[lost]})
			continue
		}
		all = append(all, q.of(there[at], wire.RoleServer, i))
	}
	return all
}

// of is what a query knows of one node.
func (q *query) of(p *peer, role wire.Role, number int) wire.NodeStatus {
	one := wire.NodeStatus{Role: role, Rank: number, Progress: q.reports[p], State: stateNames[p.state]}
	if one.State == "" && one.Progress == nil {
		one.State = "no answer"
	}
	return one
}

var stateNames = map[state]string{absent: "absent", left: "left", lost: wire.StateLost}

// serversOf are the dedicated servers that serve a round.
func (m *Machine) serversOf(r *round) []*peer {
	return slices.DeleteFunc(slices.Clone(m.pool), func(p *peer) bool { return r.server(p.Addresses) < 0 })
}

// status is the state of the machine, for people.
func (m *Machine) status() *wire.StatusReply {
	s := &wire.StatusReply{State: "forming", Uptime: m.now.Round(time.Millisecond).Seconds()}
	if n := len(m.rounds); n > 0 {
		r := m.rounds[n-1]
		s.State, s.Roster, s.Tensors = "running", r.roster, len(r.tensors.placed)
		if away := r.in(absent); len(away) > 0 {
			s.Waiting = ranksOf(away) + " to come back"
		}
	}
	if len(m.rounds) == 0 || len(m.forming) > 0 {
		s.Waiting = both(s.Waiting, m.missing())
		if workers := cmp.Or(m.expectedWorkers(), m.settings.Launched); workers > 0 {
			s.Waiting += fmt.Sprintf("; %d of %d workers have come", len(m.forming), workers)
		}
	}
	return s
}
