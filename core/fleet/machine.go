package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Machine is the policy of one job. The same inputs give the same outputs.
//
// Invariants:
//  1. A process is in at most one place: starting, waiting for a round, or a member of the current one.
//  2. A round begins only when every live member of the one before has asked, or is lost for the others.
//  3. Rank 0 has the newest state of the training, where any process has one.
//  4. A job without a round ends at the latest after twice the timeout, unless a round begins.
type Machine struct {
	settings Settings
	now      time.Duration
	wake     time.Duration // 0: there is no deadline
	out      []Output

	hosts     []Host
	blocked   map[string]*block
	processes map[int]*process // alive
	next      int              // number of the next process

	round    uint64
	members  int  // that it began with
	closed   bool // nobody joins the round any more: it has lost a member, or one has asked again; true before the first
	broken   bool // nor does it go on
	trained  bool // a process has had the state
	finished bool // a process has come to the end of the training
	failed   bool
	idle     time.Duration // since when there is no running round, -1 while there is one
	news     uint64
	told     string        // the change that the last news was about
	warnAt   time.Duration // when the user is warned that no rank has looked for it; 0 for never
}

// block is a host's record of failures.
type block struct {
	failures int
	until    time.Duration // -1 for good
}

// process is a live process.
type process struct {
	number int
	host   string
	slot   int
	since  time.Duration // of its start
	rank   int           // in the current round, -1 for none
	seated bool          // it has been in a round
	asked  *Ask          // while it waits
	lost   time.Duration // when its round lost it, until it asks; -1 if that has not
	state  bool
	commit uint64 // of the state
	going  bool   // it was dismissed or stopped: its end is no failure
}

// NewMachine makes a machine without hosts.
func NewMachine(s Settings) *Machine {
	return &Machine{settings: s, blocked: map[string]*block{}, processes: map[int]*process{}, closed: true, broken: true}
}

// Step takes one input and returns what has to be done, in order.
func (m *Machine) Step(in Input) []Output {
	m.now, m.out, m.wake = in.Now, nil, 0
	if m.failed {
		return nil
	}
	switch {
	case in.Found:
		m.hosts = slices.Clone(in.Hosts)
	case in.Ask != nil:
		m.asks(in.Ask)
	case in.Lost != nil:
		m.lost(in.Lost)
	case in.Ended != nil:
		m.ended(in.Ended)
	}
	for _, step := range []func(){m.leave, m.start, m.form, m.tell, m.expire} {
		if !m.failed {
			step()
		}
	}
	return m.out
}

// Deadline is when Step has to be called again at the latest, if no other input comes before.
func (m *Machine) Deadline() (at time.Duration, ok bool) { return m.wake, m.wake != 0 && !m.failed }

func (m *Machine) asks(a *Ask) {
	p := m.processes[a.Process]
	if p == nil || p.going {
		m.out = append(m.out, Output{Dismiss: &Dismiss{a.Process, "it does not belong to the job any more"}})
		return
	}
	if a.Early && m.round > 0 {
		m.out = append(m.out, Output{Expect: &Expect{a.Process, places(m.arrange(m.wanted()))}})
		return
	}
	p.asked, p.state, p.commit, p.lost = a, a.State, a.Commits, -1
	m.trained = m.trained || a.State
	if p.rank >= 0 {
		m.breaks(!m.settings.GoesOn)
	}
}

// lost has a member be none any more: nobody waits for it, until it asks as one that joins.
func (m *Machine) lost(l *Lost) {
	for _, p := range m.processes {
		if l.Round == m.round && p.rank == l.Rank && p.asked == nil {
			p.rank, p.lost = -1, m.now
			m.breaks(!m.settings.GoesOn)
		}
	}
}

func (m *Machine) ended(e *Ended) {
	p := m.processes[e.Process]
	if p == nil {
		return
	}
	delete(m.processes, e.Process)
	if p.rank >= 0 {
		m.breaks(!m.settings.GoesOn)
	}
	switch {
	case p.going:
	case e.OK:
		m.finished = true
	default:
		m.block(p.host)
	}
	switch {
	case len(m.processes) > 0:
	case m.finished:
		m.out = append(m.out, Output{Done: true})
	case m.trained || !p.going:
		m.fail("no process is left that has the state of the training")
	}
}

// breaks closes the current round to those who still join it, and ends it unless the others go on.
func (m *Machine) breaks(ends bool) {
	if !m.closed {
		m.closed = true
		m.out = append(m.out, Output{Broken: m.round})
	}
	m.broken = m.broken || ends
}

// block has a host get no new process for a while, twice as long after each failure.
func (m *Machine) block(host string) {
	b := m.blocked[host]
	if b == nil {
		b = &block{}
		m.blocked[host] = b
	}
	low, high := m.settings.Cooldown[0], m.settings.Cooldown[1]
	if low == 0 {
		b.until = -1
		m.say("%s gets no new process any more, because one has failed there; with --blacklist-cooldown-range it would after a while", host)
		return
	}
	pause := min(low<<min(b.failures, 20), high)
	b.failures++
	b.until = m.now + pause
	m.say("%s gets no new process for %v, because one has failed there", host, pause)
}

// leave sends away those for whom there is no slot any more, and once a rank has finished all that wait. Members of a
// running round stay until they ask.
func (m *Machine) leave() {
	order := m.sorted()
	for _, p := range order {
		var why string
		switch {
		case p.going || p.rank >= 0 && p.asked == nil:
			continue
		case m.finished:
			why = "another rank has come to the end of the training"
		case m.surplus(order, p):
			why = fmt.Sprintf("%s has no slot for it any more", p.host)
		default:
			continue
		}
		p.going, p.rank = true, -1
		if p.asked != nil {
			m.out = append(m.out, Output{Dismiss: &Dismiss{p.number, why}})
		} else {
			m.out = append(m.out, Output{Stop: &Stop{p.number, why, p.lost >= 0}})
		}
	}
}

// surplus reports whether p's host has no slot for it beside the processes that come before it.
func (m *Machine) surplus(order []*process, p *process) bool {
	before := 0
	for _, q := range order {
		if q == p {
			break
		}
		if q.host == p.host && !q.going {
			before++
		}
	}
	return before >= m.slots(p.host)
}

// wanted are the processes that a next round would have if all of them asked now.
func (m *Machine) wanted() []*process {
	order := m.sorted()
	return slices.DeleteFunc(slices.Clone(order), func(p *process) bool { return p.going || p.lost >= 0 || m.surplus(order, p) })
}

func (m *Machine) slots(host string) int {
	if i := slices.IndexFunc(m.hosts, func(h Host) bool { return h.Name == host }); i >= 0 {
		return m.hosts[i].Slots
	}
	return 0
}

// start fills the free slots of hosts that are not blocked.
func (m *Machine) start() {
	total := 0
	on, taken := map[string]int{}, map[Place]bool{}
	for _, p := range m.processes {
		on[p.host]++ // one that goes has its slot until it has gone
		taken[Place{Host: p.host, Slot: p.slot}] = true
		if !p.going {
			total++
		}
	}
	for _, h := range m.hosts {
		if b := m.blocked[h.Name]; b != nil && (b.until < 0 || m.due(b.until) == 0) {
			continue
		}
		for slot := 0; !m.finished && on[h.Name] < h.Slots && total < m.settings.Max; slot++ {
			if taken[Place{Host: h.Name, Slot: slot}] {
				continue
			}
			m.processes[m.next] = &process{number: m.next, host: h.Name, slot: slot, since: m.now, rank: -1, lost: -1}
			m.out = append(m.out, Output{Start: &Place{m.next, h.Name, slot}})
			m.next++
			on[h.Name]++
			total++
		}
	}
}

// sorted lists the processes: members of the round by rank, then the others by number.
func (m *Machine) sorted() []*process {
	last := func(rank int) int {
		if rank < 0 {
			return 1 << 30
		}
		return rank
	}
	return slices.SortedFunc(maps.Values(m.processes), func(a, b *process) int {
		return cmp.Or(cmp.Compare(last(a.rank), last(b.rank)), cmp.Compare(a.number, b.number))
	})
}

// due is how long ago a deadline was, at least 1 ns; 0 where it lies ahead, and Step is called then.
func (m *Machine) due(at time.Duration) time.Duration {
	if at <= m.now {
		return max(m.now-at, 1)
	}
	if m.wake == 0 || at < m.wake {
		m.wake = at
	}
	return 0
}

func (m *Machine) say(format string, args ...any) {
	m.out = append(m.out, Output{Say: fmt.Sprintf(format, args...)})
}

func (m *Machine) fail(format string, args ...any) {
	m.failed = true
	m.out = append(m.out, Output{Fail: fmt.Sprintf(format, args...)})
}

// places describes the hosts, for errors.
func (m *Machine) places() string {
	var parts []string
	for _, h := range m.hosts {
		text := fmt.Sprintf("%s with %d slots", h.Name, h.Slots)
		if b := m.blocked[h.Name]; b != nil && (b.until < 0 || b.until > m.now) {
			text += ", blacklisted because a process has failed there"
		}
		parts = append(parts, text)
	}
	return cmp.Or(strings.Join(parts, "; "), "none")
}
