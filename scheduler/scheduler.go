// Package scheduler holds the membership of a job: who takes part in a round, on which servers the
// partitions of tensors lie, which process sets there are, and who was lost. No gradient passes it.
// What it knows is soft: killed and started again, it learns everything from the nodes.
//
// Machine is the policy and knows neither network nor time; Scheduler is the shell around it. Read
// machine.go first, then forming.go (registration), round.go (a running round, restoring one after a
// restart), peer.go (losses), declare.go, sets.go and status.go.
package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/unique"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// Scheduler runs a Machine on real connections.
type Scheduler struct {
	log    *zap.Logger
	events chan event
	quit   chan struct{} // closed by Close
	work   sync.WaitGroup

	mu        lockorder.Mutex
	listeners map[transport.Listener]bool
	conns     map[transport.Conn]bool
	closed    bool

	seats  func(wire.Seat, func(wire.Seat, error))
	news   func(News)
	last   atomic.Uint64 // number of the last line
	leads  atomic.Bool   // it serves nodes; a standby from Lead on
	formed atomic.Bool   // a node has been told who is in the job

	probe  func(context.Context, string) (transport.Conn, error)
	wait   time.Duration   // bound of a probe
	probes context.Context // of all, until Close
	end    context.CancelFunc
}

// event is an input of the machine; line is set with a hello.
type event struct {
	Input
	line *control.Line
}

// New starts a scheduler, whose first round has a random number. It has no listener yet. No log is nil.
func New(settings Settings, log *zap.Logger) (*Scheduler, error) {
	if _, err := placement.Parse(settings.Placement); err != nil {
		return nil, err
	}
	s := &Scheduler{
		log: cmp.Or(log, zap.NewNop()), events: make(chan event), quit: make(chan struct{}),
		listeners: map[transport.Listener]bool{}, conns: map[transport.Conn]bool{}, seats: settings.Seats, news: settings.News, probe: settings.Dial, wait: cmp.Or(settings.LostAfter, 10*time.Second) / 2,
	}
	s.probes, s.end = context.WithCancel(context.Background())
	s.leads.Store(!settings.Standby)
	s.mu.Place(levelDoors, "scheduler.mu")
	settings.FirstRound = unique.Number()>>1 + 1
	machine := NewMachine(settings)
	s.work.Go(func() { s.loop(machine) })
	return s, nil
}

// Serve accepts nodes from a listener until the listener or the scheduler is closed, and then returns nil. It closes the listener. Several listeners can be served at once.
func (s *Scheduler) Serve(l transport.Listener) error {
	defer l.Close()
	if !s.hold(func() { s.listeners[l] = true }) {
		return nil
	}
	defer s.hold(func() { delete(s.listeners, l) })
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("scheduler: %w", err)
		}
		if !s.hold(func() { s.conns[conn] = true; s.work.Go(func() { s.greet(conn) }) }) {
			conn.Close()
			return nil
		}
	}
}

// Close ends the scheduler and all lines. Nodes continue without it.
func (s *Scheduler) Close() error {
	var open []io.Closer
	s.hold(func() {
		s.closed = true
		close(s.quit)
		s.end()
		for l := range s.listeners {
			open = append(open, l)
		}
		for c := range s.conns {
			open = append(open, c)
		}
	})
	for _, c := range open {
		c.Close()
	}
	s.work.Wait()
	return nil
}

// hold runs f under the lock and reports true, or false where the scheduler is closed.
func (s *Scheduler) hold(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	f()
	return true
}

// greet reads a node's hello, then its line until that ends.
func (s *Scheduler) greet(conn transport.Conn) {
	defer s.hold(func() { delete(s.conns, conn) })
	defer conn.Close()
	hello, err := control.ReadHello(conn)
	if errors.Is(err, io.EOF) { // somebody has looked whether a scheduler is here
		return
	}
	if err != nil {
		s.log.Warn("closed a connection that does not begin with a node's hello", zap.Stringer("peer", conn.RemoteAddr()), zap.Error(err))
		return
	}
	if !s.leads.Load() {
		return
	}
	line := control.NewLine(conn)
	id := Line(s.last.Add(1))
	if !s.tell(event{Input{Line: id, Hello: &hello}, line}) {
		return
	}
	why := line.Run(func(m *wire.Control) {
		if m.Clock != nil {
			line.Push(&wire.Control{Clock: &wire.Clock{Sent: m.Clock.Sent, Scheduler: time.Now().UnixNano()}})
			return
		}
		if m.Seat != nil {
			s.seat(line, m)
			return
		}
		s.tell(event{Input: Input{Line: id, Message: m}})
	})
	s.tell(event{Input: Input{Line: id, Closed: "the connection ended without a goodbye: " + why.Error(), Silent: transport.Silent(why)}})
}

// seat passes what a process asks the launcher on.
func (s *Scheduler) seat(line *control.Line, m *wire.Control) {
	if s.seats == nil {
		line.Push(&wire.Control{ID: m.ID, Error: "no launcher gives places in this job: start it by `paceline run --min-np`"})
		return
	}
	s.seats(*m.Seat, func(answer wire.Seat, err error) {
		if err != nil {
			line.Push(&wire.Control{ID: m.ID, Error: err.Error()})
			return
		}
		line.Push(&wire.Control{ID: m.ID, Seat: &answer})
	})
}

// Lead has a standby serve nodes, and reports whether it has not done so before.
func (s *Scheduler) Lead() (first bool) { return s.leads.CompareAndSwap(false, true) }

// look finds out whether the process that listens at an address has ended. One that does not answer may run.
func (s *Scheduler) look(session uint64, address string) {
	ctx, cancel := context.WithTimeout(s.probes, s.wait)
	defer cancel()
	for {
		conn, err := s.probe(transport.Once(ctx), address)
		switch {
		case err == nil:
			conn.Close()
			s.tell(event{Input: Input{Answered: session}})
			return
		case errors.Is(err, syscall.ECONNREFUSED):
			s.tell(event{Input: Input{Ended: session}})
			return
		}
		select { // it may be about to end: its connections do first
		case <-time.After(probePause):
		case <-ctx.Done():
			return
		}
	}
}

// probePause is between attempts to reach a process that may be about to end.
const probePause = 20 * time.Millisecond

// Advance has workers that join an earlier round of the launcher be refused.
func (s *Scheduler) Advance(to uint64) { s.tell(event{Input: Input{Advance: to}}) }

// tell passes an event to the loop, and reports false where the scheduler is closed.
func (s *Scheduler) tell(e event) bool {
	select {
	case s.events <- e:
		return true
	case <-s.quit:
		return false
	}
}

// loop runs the machine: one input after the other, and the passing of time.
func (s *Scheduler) loop(machine *Machine) {
	start := time.Now()
	clock := clock{patience: s.wait / 4}
	lines := map[Line]*control.Line{}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		var e event
		select {
		case <-s.quit:
			return
		case <-timer.C:
		case e = <-s.events:
		}
		if e.line != nil {
			lines[e.Line] = e.line
		}
		e.Now = clock.now(time.Since(start), machine)
		s.do(machine.Step(e.Input), lines)
		if e.Closed != "" {
			delete(lines, e.Line)
		}
		if at, ok := machine.Deadline(); ok {
			timer.Reset(at - clock.now(time.Since(start), machine))
		} else {
			timer.Stop()
		}
	}
}

// do carries out the outputs of the machine.
func (s *Scheduler) do(outputs []Output, lines map[Line]*control.Line) {
	for _, o := range outputs {
		switch line := lines[o.Line]; {
		case o.Log != "" && o.Warn:
			s.log.Warn(o.Log)
		case o.Log != "":
			s.log.Info(o.Log)
		case o.News != nil:
			if s.news != nil {
				s.news(*o.News)
			}
		case o.Probe != 0:
			if s.probe != nil {
				s.hold(func() { s.work.Go(func() { s.look(o.Probe, o.Address) }) })
			}
		case line == nil: // it has ended meanwhile
		case o.Close:
			line.Finish()
		default:
			if o.Message.Roster != nil {
				s.formed.Store(true)
			}
			line.Push(o.Message)
		}
	}
}

// Formed reports whether the job's processes have found each other.
func (s *Scheduler) Formed() bool { return s.formed.Load() }
