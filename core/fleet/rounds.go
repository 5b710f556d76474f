package fleet

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/paceline/paceline/internal/each"
)

// form begins a round when nobody has to be waited for.
func (m *Machine) form() {
	var waiting []*process
	starting := false
	for _, p := range m.sorted() {
		switch {
		case p.going:
		case p.rank >= 0 && p.asked == nil:
			return
		case p.asked != nil:
			waiting = append(waiting, p)
		default:
			starting = m.starts(p) || starting
		}
	}
	need, _ := m.need()
	switch {
	case len(waiting) < need || m.round == 0 && starting || m.finished:
		return
	case m.bereft(waiting):
		m.fail("every process that had the state of the training is lost; the %d that are left are new", len(waiting))
		return
	case m.limited():
		m.fail("the ranks would form a new round after the limit of %d (--reset-limit)", m.settings.ResetLimit)
		return
	}
	m.seat(waiting)
}

// need is with how many processes a round may begin, and the flag that says it. The first round does without those that have failed before it.
func (m *Machine) need() (int, string) {
	if m.round == 0 && len(m.blocked) == 0 && m.settings.First > m.settings.Min {
		return m.settings.First, "-np"
	}
	return m.settings.Min, "--min-np"
}

// limited reports whether no more rounds may follow.
func (m *Machine) limited() bool {
	return m.settings.ResetLimit > 0 && m.round > uint64(m.settings.ResetLimit)
}

// starts reports whether a process that has not asked yet is waited for.
func (m *Machine) starts(p *process) bool { return m.due(p.since+m.settings.Start) == 0 }

// bereft reports whether a training would begin anew.
func (m *Machine) bereft(waiting []*process) bool {
	none := func(has func(*process) bool) bool { return !slices.ContainsFunc(waiting, has) }
	return none(func(p *process) bool { return p.state }) && (m.trained || m.round > 0 && none(func(p *process) bool { return p.seated }))
}

// seat gives everybody who waits a rank.
func (m *Machine) seat(waiting []*process) {
	if m.round++; m.round == 1 && len(waiting) < m.settings.First {
		m.say("the training begins with %d processes instead of %d (-np)", len(waiting), m.settings.First)
	}
	waiting = m.arrange(waiting)
	r := &Round{Number: m.round, Members: places(waiting), Commits: waiting[0].commit, Skip: true, News: m.news}
	for i, p := range waiting {
		r.Skip = r.Skip && p.state && p.asked.Skip
		p.rank, p.seated, p.asked = i, true, nil
	}
	m.closed, m.broken, m.told, m.members = false, false, "", len(waiting)
	m.out = append(m.out, Output{Round: r})
}

// arrange sorts processes by the ranks that they get. The hosts are in the order of their lowest former rank that has the newest state.
func (m *Machine) arrange(processes []*process) []*process {
	first := map[string]int{} // of each host, the place of its first process
	slices.SortStableFunc(processes, func(a, b *process) int {
		return cmp.Or(cmp.Compare(stateless(a), stateless(b)), cmp.Compare(b.commit, a.commit))
	})
	for i, p := range processes {
		if _, ok := first[p.host]; !ok {
			first[p.host] = i
		}
	}
	slices.SortStableFunc(processes, func(a, b *process) int { return cmp.Compare(first[a.host], first[b.host]) })
	return processes
}

func places(processes []*process) []Place {
	return each.Of(processes, func(p *process) Place { return Place{p.number, p.host, p.slot} })
}

func stateless(p *process) int {
	if p.state {
		return 0
	}
	return 1
}

// tell tells the members of a running round, once, that processes wait to join, that some have to go, or that they go on without one that
// is lost: until they form a round of their own nobody has its share of the samples or, of rank 0, does what a script does on that alone.
func (m *Machine) tell() {
	var joins, leaves []int
	seated, left, starting, order := 0, 0, false, m.sorted()
	for _, p := range order {
		if p.rank >= 0 {
			left++
		}
		switch {
		case p.going:
		case p.rank >= 0 && p.asked == nil:
			seated++
			if m.surplus(order, p) {
				leaves = append(leaves, p.number)
			}
		case p.asked != nil && (p.rank < 0 || m.settings.GoesOn):
			joins = append(joins, p.number)
		case p.asked == nil && p.lost < 0:
			starting = m.starts(p) || starting
		}
	}
	if starting {
		joins = nil // all join together
	}
	fewer := left < m.members && left >= m.settings.Min && !m.limited() // they form a round at once
	change := fmt.Sprint(joins, leaves, fewer)
	switch {
	case m.finished || m.broken || seated == 0 || len(joins)+len(leaves) == 0 && !fewer:
		return
	case change != m.told:
		m.news++
		m.told, m.warnAt = change, 0
		if m.settings.Warning > 0 {
			m.warnAt = m.now + m.settings.Warning
		}
		m.out = append(m.out, Output{News: &News{m.news, len(joins) == 0}})
	}
	if m.warnAt > 0 && m.due(m.warnAt) > 0 {
		m.warnAt = 0
		m.say("the hosts changed %v ago, and the change waits until the ranks call state.commit() or state.check_host_updates()", m.settings.Warning)
	}
}

// runs reports whether somebody trains in the current round.
func (m *Machine) runs() bool {
	return !m.broken && slices.ContainsFunc(m.sorted(), func(p *process) bool { return p.rank >= 0 && p.asked == nil && !p.going })
}

// expire ends what has been without a round for too long: processes that do not ask, then the job.
func (m *Machine) expire() {
	stopped := 0
	for _, p := range m.sorted() {
		if p.lost >= 0 && !p.going && m.due(p.lost+m.settings.Timeout) > 0 {
			p.lost = m.now
			m.hung(p, "its round lost it %v ago")
			stopped++
		}
	}
	if m.finished || m.runs() {
		m.idle = -1
		return
	}
	if m.idle < 0 {
		m.idle = m.now
	}
	if m.due(m.idle+m.settings.Timeout) == 0 {
		return
	}
	m.idle = m.now
	hung, waiting := stopped, 0
	for _, p := range m.sorted() {
		if p.rank >= 0 && p.asked == nil && !p.going {
			hung++
			m.hung(p, "its round ended %v ago")
		} else if p.asked != nil && !p.going {
			waiting++
		}
	}
	if hung > 0 {
		return
	}
	need, flag := m.need()
	m.fail("after %v %d of %d processes (%s) are there; hosts: %s. Give the job more hosts, a smaller %s or a longer --elastic-timeout",
		m.settings.Timeout, waiting, need, flag, m.places(), flag)
}

// hung stops a process that does not ask for a place.
func (m *Machine) hung(p *process, since string) {
	m.out = append(m.out, Output{Stop: &Stop{p.number, fmt.Sprintf(since+", and it does not ask for a place in the next", m.settings.Timeout), true}})
}
