package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Line numbers one connection of a node. Numbers start at 1 and are never used twice.
type Line uint64

// Input is one event. Exactly one of Hello, Message, Closed, Advance, Ended and Answered is set, or none where only time has passed.
type Input struct {
	Now      time.Duration // since the scheduler started; never falls
	Line     Line
	Hello    *wire.Hello   // the line has opened
	Message  *wire.Control // a message came on it; the machine keeps parts of it
	Closed   string        // the line has ended, and why
	Silent   bool          // with Closed: because nothing was heard on it
	Ended    uint64        // the process of that session has ended, as a probe says
	Answered uint64        // it has answered a probe
	Advance  uint64        // the launcher goes on to its round of that number: workers that join an earlier one are refused
}

// Output is one thing to do: a message to send, a line to close after what was sent on it before, a process to probe,
// or something to log.
type Output struct {
	Line    Line
	Message *wire.Control // shared with other outputs: not to be changed
	Close   bool
	Probe   uint64 // session of a process: Ended, if its host refuses a connection to Address, and Answered, if there is one
	Address string
	News    *News // for the launcher
	Log     string
	Warn    bool // the log line is a warning
}

// News is what the launcher of a job learns of its processes. One of Lost and Began is set.
type News struct {
	Lost  *wire.Node // the others go on without it, or form another round; it may run
	Round uint64     // that has lost a worker, by the count of a launcher whose job changes its size; 0 under others
	Began []int      // ranks with which a round begins
}

// Settings of a Machine. Zero fields have the meaning or the default in their comment.
type Settings struct {
	FirstRound uint64        // number of the first round; random, so that no round's number is ever used again
	Workers    int           // of the job; 0: as the first worker says
	Launched   int           // workers that were started, which status shows until one of them says their number; 0: not known
	Beside     bool          // who has started them is on their host, and sees the ends of their processes
	Dedicated  int           // dedicated servers to wait for; 0: as the first worker says
	Placement  string        // of keys on servers, where no worker says; "": placement.Default
	Grace      time.Duration // from the end of a line to the loss of its node; 3 s
	LostAfter  time.Duration // how long a restarted scheduler waits for nodes to come back; 10 s

	PeerTimeout time.Duration // of this process's lines, which that of nodes has to be like; 0: it is compared elsewhere

	// Seats is a launcher's, whose job changes its size: it gets what processes ask it, and answers now or later, once.
	// News is any launcher's: it is called for each, in their order, and returns soon. The machine uses neither. nil: such questions are
	// refused, and nobody is told.
	Seats func(ask wire.Seat, answer func(wire.Seat, error))
	News  func(News)

	// The shell's. The machine does not use them.
	Standby bool                                                  // it serves nobody until Lead
	Dial    func(context.Context, string) (transport.Conn, error) // for probes; nil: there are none
}

// Machine is the whole policy of the scheduler: the members of a round of the job, the placement of keys,
// process sets and losses. It has no clock, network or goroutine: the same inputs give the same outputs.
//
// Invariants:
//  1. A line carries at most one peer and a peer is on at most one line.
//  2. A request is answered once, on the line that it came from; one whose line ended is dropped
//     (the client repeats it on its next line).
//  3. Every node of a round is told of a loss at most once; on a side of a network that cannot go on, again when that has waited again for who came back.
//  4. While a restored round lacks workers, nothing is declared in it, because they may know of it already.
type Machine struct {
	settings Settings
	now      time.Duration
	wake     time.Duration // the next deadline is not before this; 0: there is none
	out      []Output

	lines         map[Line]*line
	sessions      map[uint64]*peer // peers by the number that their client keeps over reconnections
	forming       []*peer          // workers that wait for the next round, in the order in which they came
	pool          []*peer          // dedicated servers, in the order in which they came
	rounds        []*round         // that have workers left, oldest first
	over          []uint64         // numbers of rounds that have ended, the latest last: who was lost may come back later
	next          uint64           // number of the next round
	dedicated     int              // servers that the last round waited for
	queries       []*query         // for reports that have not all come
	lastQuery     uint64
	refusal       string      // why the last worker was refused, for those that wait for it
	gaveUp        rankset.Set // that came, and wait no longer, for those that still do
	exit          *exit       // of the server that leaves empty at present; nil for none
	exits         []request   // of servers that are to, after it
	launcherRound uint64      // number of the launcher's round that forms; 0 where the job's size stays
}

// line is one connection. It carries a peer from its registration on.
type line struct {
	id    Line
	hello wire.Hello
	peer  *peer
}

// NewMachine makes a machine without nodes.
func NewMachine(s Settings) *Machine {
	s.Grace, s.LostAfter = cmp.Or(s.Grace, 3*time.Second), cmp.Or(s.LostAfter, 10*time.Second)
	return &Machine{settings: s, next: s.FirstRound, lines: map[Line]*line{}, sessions: map[uint64]*peer{}}
}

// Step takes one input and returns what has to be done, in order.
func (m *Machine) Step(in Input) []Output {
	m.now, m.out = in.Now, nil
	l := m.lines[in.Line]
	switch {
	case in.Hello != nil:
		m.open(in.Line, *in.Hello)
	case in.Ended != 0:
		m.ended(in.Ended)
	case in.Answered != 0:
		m.reached(in.Answered)
	case in.Advance != 0:
		m.advance(in.Advance)
	case l == nil: // time, or a message on a line that was closed here
	case in.Message != nil:
		m.receive(l, in.Message)
	case in.Closed != "":
		m.closed(l, in.Closed, in.Silent)
	}
	if m.wake != 0 && m.now >= m.wake {
		m.expire()
	}
	return m.out
}

// Deadline is when Step has to be called again at the latest, if no other input comes before.
func (m *Machine) Deadline() (at time.Duration, ok bool) { return m.wake, m.wake != 0 }

func (m *Machine) open(id Line, h wire.Hello) {
	switch h.Role {
	case wire.RoleWorker, wire.RoleServer, wire.RoleObserver:
		m.lines[id] = &line{id: id, hello: h}
	default:
		m.warn("closed a connection: it says hello as %q, which is no role of a node towards the scheduler", h.Role)
		m.out = append(m.out, Output{Line: id, Close: true})
	}
}

func (m *Machine) receive(l *line, c *wire.Control) {
	switch {
	case c.Register != nil:
		m.register(l, c)
	case len(c.Declare) > 0 || len(c.AddSet) > 0 || len(c.FindSet) > 0 || c.RemoveID != 0:
		m.ask(l, c)
	case c.Lost != nil:
		m.reported(l, *c.Lost)
	case c.Status != nil:
		m.asked(l, c)
	case c.Progress != nil:
		m.reports(l, c.Progress)
	case c.Profile != nil:
		m.profiled(l, c.Profile)
	case c.Bye:
		m.bye(l)
	case c.Farewell:
		m.farewell(l)
	case c.Drain != nil:
		m.drain(l, c)
	default:
		m.refuse(l, c.ID, "the request is empty, or of a kind that this scheduler does not know")
	}
}

// closed handles the end of a line without a goodbye. A worker that waits for a round is forgotten;
// other nodes have the grace time to reconnect.
func (m *Machine) closed(l *line, why string, silent bool) {
	delete(m.lines, l.id)
	m.exited(l)
	p := l.peer
	if p == nil {
		return
	}
	p.line = nil
	switch {
	case p.Role == wire.RoleWorker && p.round == nil:
		m.giveUp(p)
	case p.state == present || p.state == absent: // an absent one has sent only a part of what it knows
		p.why, p.silent = why, p.silent || silent
		if silent && m.alone(p) { // a debugger may hold it
			return
		}
		p.lostAt = m.at(m.now + m.grace(p))
		m.probe(p)
		if len(p.accusers) > 0 { // they were right
			p.accusers, p.judged = nil, 0
			m.hurry(p, why)
			m.lose(p, why)
		}
	}
}

// bye handles a goodbye.
func (m *Machine) bye(l *line) {
	if p := l.peer; p != nil {
		m.leave(p)
	}
	m.exited(l)
	m.close(l)
}

// farewell handles the goodbye of a worker whose process stays for the server in it.
func (m *Machine) farewell(l *line) {
	if p := l.peer; p != nil && p.round != nil && p.state == present {
		p.farewell = true
		m.without(p)
	}
}

// expire does everything that is due.
func (m *Machine) expire() {
	m.wake = 0
	for _, p := range slices.Clone(m.forming) {
		if m.due(p.until) {
			m.refuse(p.line, p.asked, fmt.Sprintf("waited %s for %s; %s came", seconds(m.now-p.since), m.missing(), m.here()))
			m.giveUp(p)
		}
	}
	for _, p := range slices.Clone(m.pool) {
		switch {
		case m.due(p.lostAt):
			m.lose(p, p.why)
		case m.due(p.judged):
			m.judge(p)
		}
	}
	for _, r := range slices.Clone(m.rounds) {
		for _, p := range r.workers {
			switch {
			case m.due(p.lostAt):
				m.lose(p, p.why)
			case m.due(p.judged):
				m.judge(p)
			}
		}
		if m.due(r.settleBy) {
			m.endUnsettled(r)
		}
		m.expireCalls(r)
	}
	m.expireQueries()
}

// due reports whether deadline t has passed; else it stays scheduled.
func (m *Machine) due(t time.Duration) bool {
	if t == 0 || t <= m.now {
		return t != 0
	}
	m.at(t)
	return false
}

// at makes sure that Step runs at time t, and returns t.
func (m *Machine) at(t time.Duration) time.Duration {
	if m.wake == 0 || t < m.wake {
		m.wake = t
	}
	return t
}

// deadline is when a request that came now is answered with an error; 0 is never.
func (m *Machine) deadline(c *wire.Control) time.Duration {
	if c.Wait <= 0 || c.Wait > maxWait.Seconds() {
		return 0
	}
	return m.at(m.now + time.Duration(c.Wait*float64(time.Second)))
}

// maxWait is the longest wait that sets a deadline; a longer one sets none.
const maxWait = 1000 * time.Hour

func (m *Machine) send(l *line, c *wire.Control) {
	if l != nil {
		m.out = append(m.out, Output{Line: l.id, Message: c})
	}
}

func (m *Machine) answer(l *line, id uint64, c *wire.Control) {
	c.ID = id
	m.send(l, c)
}

func (m *Machine) refuse(l *line, id uint64, why string) {
	m.answer(l, id, &wire.Control{Error: why})
}

// attach binds p to line l and closes the line that p had before.
func (m *Machine) attach(l *line, p *peer) {
	if old := p.line; old != nil && old != l {
		old.peer = nil
		m.close(old)
	}
	p.line, l.peer, p.lostAt, p.waited, p.told, p.silent, p.why, p.missed = l, p, 0, false, false, false, "", ""
	p.asksFor, p.askedFor = 0, 0
	if p.came = true; p.Role == wire.RoleWorker && !p.reached {
		m.probe(p)
	}
	m.answered(p)
}

func (m *Machine) close(l *line) {
	delete(m.lines, l.id)
	m.out = append(m.out, Output{Line: l.id, Close: true})
}

func (m *Machine) info(format string, args ...any) {
	m.out = append(m.out, Output{Log: fmt.Sprintf(format, args...)})
}

func (m *Machine) warn(format string, args ...any) {
	m.out = append(m.out, Output{Log: fmt.Sprintf(format, args...), Warn: true})
}

// seconds formats a duration for messages: "60 s", "0.5 s".
func seconds(d time.Duration) string {
	return fmt.Sprintf("%.4g s", d.Round(100*time.Millisecond).Seconds())
}
