// Package control is the line between a node and the scheduler: control messages in frames, and the
// client of workers and dedicated servers.
//
// The scheduler may be killed and started again at any time. The client reconnects in the background,
// sends the new scheduler what this node knows of the round, and repeats the requests that were not
// answered. Its callers notice only the delay.
package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/unique"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// Config is what a Client needs. Zero fields have the default in their comment.
//
// OnLost, OnRemoved, OnDrain, OnRoster and Progress are called one at a time, in the order of the scheduler's messages; they must
// return soon and may not wait for an answer from the same client.
type Config struct {
	Transport transport.Transport
	Address   string                  // of the scheduler, host:port; several at which it may be are separated by commas
	Attempt   time.Duration           // bound of an attempt to reach one of several places; 5 s
	Lead      func()                  // the scheduler goes on in this process, at the standby that it has registered; nil for a node that has none
	Hello     wire.Hello              // role and rank of this node
	Log       *zap.Logger             // nil: no log
	Idle      func() bool             // this node is in no job that runs, and misses no scheduler; nil for one that always is
	OnLost    func(wire.Lost)         // the job has lost a node, possibly this one
	Progress  func() wire.Progress    // how far this node is; called as the other two are; nil for a node that takes no part
	OnRemoved func(wire.RemovedSet)   // every worker has removed a process set; nil for a node that is no dedicated server
	OnDrain   func()                  // somebody wants this server to leave the job empty; nil for a node that is no dedicated server
	OnRoster  func(*membership.Epoch) // an epoch of a round that this node is in; each once, and to a server again when ranks leave; the round's first before Register returns; owned by the callee
}

// Client is a node's line to the scheduler. Its methods may be called from any goroutine.
//
// Every request ends when its context does, with an error that names the request, the scheduler and
// the time. Where the context has a deadline the scheduler is told of it and answers shortly before,
// naming the nodes that it waited for. A refusal is a *RefusedError.
type Client struct {
	config  Config
	session uint64
	ctx     context.Context // until the client is closed
	cancel  context.CancelFunc
	ended   chan struct{} // run has returned
	setTurn chan struct{} // held during a call on process sets, which are ordered

	mu      lockorder.Mutex
	at      string // where the scheduler of this line is, or of the last one
	line    *Line  // nil while there is none
	broken  error  // why there is none, and since when
	since   time.Time
	quick   time.Time // until when searches are quick ones: the last line fell silent, while this process ran
	closing bool
	refused error // the scheduler has refused this node: every request fails
	lastID  uint64
	resume  uint64 // the request by which this node registers again
	pending map[uint64]*request
	memory  memory
	clock   clock
}

// ErrClosed is the error of requests on a client that was closed.
var ErrClosed = errors.New("the line to the scheduler was closed")

// RefusedError is the scheduler's answer to a request that it refuses.
type RefusedError struct {
	Request string // what was asked, for example "register"
	Address string // of the scheduler
	Reason  string // names the nodes and values concerned
	Missed  bool   // a node does not come that is needed, as when it was lost
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("%s: %s (scheduler %s)", e.Request, e.Reason, e.Address)
}

// Dial connects to the scheduler, which may start later: it tries until ctx ends.
func Dial(ctx context.Context, config Config) (*Client, error) {
	config.Log, config.Attempt = cmp.Or(config.Log, zap.NewNop()), cmp.Or(config.Attempt, defaultAttempt)
	c := &Client{
		config: config, session: unique.Number() | 1, memory: newMemory(),
		ended: make(chan struct{}), setTurn: make(chan struct{}, 1), pending: map[uint64]*request{},
	}
	c.mu.Place(levelClient, "control.Client.mu")
	conn, err := c.find(ctx)
	if err != nil {
		return nil, fmt.Errorf("no line to the scheduler: %w", err)
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go c.run(c.open(conn))
	return c, nil
}

// Close says goodbye and ends the line. Requests in flight fail with ErrClosed. It waits at most
// a second for the scheduler.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closing {
		c.mu.Unlock()
		<-c.ended
		return nil
	}
	c.closing = true
	line := c.line
	c.mu.Unlock()
	if line != nil {
		line.Push(&wire.Control{Bye: true}) // the scheduler closes the line in answer
		select {
		case <-c.ended:
		case <-time.After(finishTime):
			line.Fail(ErrClosed)
		}
	}
	c.cancel()
	<-c.ended
	return nil
}

// Refused is closed when the scheduler has refused this node, or the client is closed; Err then says why.
func (c *Client) Refused() <-chan struct{} { return c.ended }

// Err is why every request fails, nil while they do not.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.refused
}

// run maintains a line until the client is closed or the scheduler refuses this node.
func (c *Client) run(line *Line) {
	defer close(c.ended)
	defer c.end()
	pause := firstPause
	for {
		start := time.Now()
		why := line.Run(func(m *wire.Control) { c.dispatch(line, m) })
		c.mu.Lock()
		if c.quick = (time.Time{}); transport.Silent(why) && !errors.Is(why, transport.ErrStopped) {
			c.quick = time.Now().Add(quickSweeps * c.sweep())
		}
		if c.memory.silent = ""; transport.Silent(why) && !c.listed() {
			c.memory.silent = cmp.Or(c.at, c.config.Address)
		}
		c.mu.Unlock()
		if !c.lost(why) {
			return
		}
		if c.config.Idle == nil || !c.config.Idle() {
			c.config.Log.Warn("the line to the scheduler is broken; training goes on, trying again", zap.String("scheduler", c.at), zap.Error(why))
		} else {
			c.config.Log.Info("the scheduler has gone; waiting for the next job", zap.String("scheduler", c.at), zap.Error(why))
		}
		pause = min(2*pause, lastPause)
		if time.Since(start) > lastPause {
			pause = firstPause // the line was stable: reconnect soon
		}
		conn := c.redial(pause)
		if conn == nil {
			return
		}
		line = c.open(conn)
		c.config.Log.Info("the line to the scheduler is back", zap.String("scheduler", c.at))
	}
}

// Pauses before attempts to reconnect double from the first to the last. Where one side has refused the other, as with a
// certificate that has expired, only somebody's help makes another attempt end differently.
const (
	firstPause   = 20 * time.Millisecond
	lastPause    = time.Second
	refusedPause = 30 * time.Second
)

// redial connects again, after a pause, without end; nil when the client was closed.
func (c *Client) redial(pause time.Duration) transport.Conn {
	for refused := false; ; pause = min(2*pause, lastPause) {
		if c.places().standbys { // who goes on without a scheduler that fell silent waits for those that come
			pause = min(pause, c.sweep())
		}
		if refused {
			pause = refusedPause
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2)): // spread, because all nodes reconnect at once
		case <-c.ctx.Done():
			return nil
		}
		conn, err := c.look(c.ctx)
		if err == nil {
			return conn
		}
		if refused = auth.Refused(err); refused {
			c.config.Log.Error("the line to the scheduler cannot come back as things are; training goes on without it",
				zap.Duration("next attempt in", refusedPause), zap.Error(err))
		}
		c.mu.Lock()
		c.broken = err
		c.mu.Unlock()
	}
}

// open makes a line over conn and adopts it.
func (c *Client) open(conn transport.Conn) *Line {
	line := NewLine(conn)
	if !c.adopt(line) {
		line.Fail(ErrClosed)
	}
	return line
}

// adopt makes a line the current one, unless the client is closed. What the scheduler has to know goes first on it.
func (c *Client) adopt(line *Line) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return false
	}
	c.line, c.broken = line, nil
	if c.clock.at != c.at { // another host's
		c.clock = clock{at: c.at}
	}
	first := []*wire.Control{askClock()}
	for _, r := range c.memory.registers() {
		c.lastID++
		c.resume = c.lastID
		first = append(first, &wire.Control{ID: c.resume, Register: &r})
	}
	for _, id := range slices.Sorted(maps.Keys(c.pending)) {
		first = append(first, c.pending[id].message(id))
	}
	line.begin(first)
	return true
}

// lost notes that the line has broken and reports whether to make another.
func (c *Client) lost(why error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.line, c.broken, c.since = nil, why, time.Now()
	return !c.closing && c.refused == nil
}

// end fails everything that is still in flight.
func (c *Client) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused == nil {
		c.refused = ErrClosed
	}
	for id, r := range c.pending {
		r.fail(c.refused)
		delete(c.pending, id)
	}
}

// dispatch handles one message of the scheduler.
func (c *Client) dispatch(line *Line, m *wire.Control) {
	c.mu.Lock()
	if m.Clock != nil {
		c.clock.heard(m.Clock, time.Now().UnixNano())
	}
	request := c.pending[m.ID]
	delete(c.pending, m.ID)
	again := m.ID != 0 && m.ID == c.resume
	if again && m.Error != "" {
		c.refused = &RefusedError{"register again", c.config.Address, m.Error, m.Missed}
	}
	fresh := m.Error == "" && c.memory.learn(request, m)
	var lost []wire.Lost
	if again && m.Error == "" { // a scheduler that was restarted knows the round of this node now: a dedicated server may have come before any worker
		lost = slices.Clone(c.memory.lost)
	}
	c.mu.Unlock()
	for _, l := range lost {
		line.Push(&wire.Control{Lost: &l})
	}
	switch {
	case again && m.Error != "":
		c.config.Log.Error("the scheduler has refused this node", zap.String("reason", m.Error))
		line.Finish()
		c.tellLost(wire.Lost{Role: c.config.Hello.Role, Rank: c.config.Hello.Rank, Why: m.Error})
	case m.Lost != nil:
		c.tellLost(*m.Lost)
	case m.Drain != nil && request == nil && c.config.OnDrain != nil:
		c.config.OnDrain()
	case m.Removed != nil && c.config.OnRemoved != nil:
		c.config.OnRemoved(*m.Removed)
	case m.Progress != nil && c.config.Progress != nil:
		p := c.config.Progress()
		p.Query = m.Progress.Query
		line.Push(&wire.Control{Progress: &p})
	case fresh && c.config.OnRoster != nil:
		if e, err := c.epochOf(m.Roster); err == nil {
			c.config.OnRoster(e)
		} else {
			c.config.Log.Error("the scheduler sent an invalid roster", zap.Error(err))
		}
	}
	if request != nil {
		request.answer <- m
	}
}

// epochOf makes an epoch of its roster, as this node sees it.
func (c *Client) epochOf(r *wire.Roster) (*membership.Epoch, error) {
	e, err := EpochOf(r)
	if err == nil {
		e.Here = slices.IndexFunc(e.Servers, func(s membership.Server) bool { return s.Incarnation == c.session })
	}
	return e, err
}

func (c *Client) tellLost(lost wire.Lost) {
	if c.config.OnLost != nil {
		c.config.OnLost(lost)
	}
}
