package control

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// request waits for its answer, over one line or several.
type request struct {
	name   string
	msg    wire.Control
	until  time.Time          // deadline of its context, zero if there is none
	answer chan *wire.Control // gets one
	err    error              // set before a nil answer
}

// message is the request as it is sent now. The scheduler answers shortly before the deadline.
func (r *request) message(id uint64) *wire.Control {
	m := r.msg
	m.ID = id
	if !r.until.IsZero() {
		left := time.Until(r.until)
		m.Wait = max(left-min(left/10, time.Second), time.Millisecond).Seconds()
	}
	return &m
}

func (r *request) fail(err error) {
	r.err = err
	r.answer <- nil
}

// Register joins the job. For a worker it returns when all have come, with the first epoch of the
// round; for a dedicated server with that of the first round, and further ones go to Config.OnRoster.
// The session number is the client's to set.
func (c *Client) Register(ctx context.Context, r wire.Register) (*membership.Epoch, error) {
	r.Node.Session = c.session
	c.mu.Lock()
	c.memory.register = r
	c.mu.Unlock()
	m, err := c.ask(ctx, "register", wire.Control{Register: &r})
	if err != nil {
		return nil, err
	}
	if m.Roster == nil {
		return nil, c.unexpected("register")
	}
	e, err := c.epochOf(m.Roster)
	if err != nil {
		return nil, fmt.Errorf("register: the roster of the scheduler at %s is invalid: %w", c.config.Address, err)
	}
	return e, nil
}

// Declare makes tensors known to the job and returns, beside each, its number and the servers of its
// partitions. Tensors of one call are placed together; very many are sent in several messages.
func (c *Client) Declare(ctx context.Context, tensors []wire.Tensor) ([]wire.Placed, error) {
	all := make([]wire.Placed, 0, len(tensors))
	for len(tensors) > 0 {
		n, err := batch(tensors)
		if err != nil {
			return nil, fmt.Errorf("declare: %w", err)
		}
		name := fmt.Sprintf("declare %q", tensors[0].Name)
		if n > 1 {
			name = fmt.Sprintf("%s and %d more", name, n-1)
		}
		m, err := c.ask(ctx, name, wire.Control{Declare: tensors[:n]})
		if err != nil {
			return nil, err
		}
		if len(m.Placed) != n {
			return nil, c.unexpected(name)
		}
		all, tensors = append(all, m.Placed...), tensors[n:]
	}
	return all, nil
}

// AddSet makes a process set of the given global ranks. Every worker of the job calls it, and all get
// the same answer; a set that exists keeps its number.
func (c *Client) AddSet(ctx context.Context, ranks []int) (wire.ProcessSet, error) {
	if len(ranks) == 0 || len(ranks) > limits.MaxRanks {
		return wire.ProcessSet{}, fmt.Errorf("process set of %d ranks, allowed are 1 to %d", len(ranks), limits.MaxRanks)
	}
	return c.call(ctx, fmt.Sprintf("add process set %v", ranks), wire.Control{AddSet: slices.Clone(ranks)})
}

// FindSet is AddSet without the other workers: the set is made if there is none of these ranks.
func (c *Client) FindSet(ctx context.Context, ranks []int) (wire.ProcessSet, error) {
	if len(ranks) == 0 || len(ranks) > limits.MaxRanks {
		return wire.ProcessSet{}, fmt.Errorf("process set of %d ranks, allowed are 1 to %d", len(ranks), limits.MaxRanks)
	}
	name := fmt.Sprintf("find process set %v", ranks)
	answer, err := c.ask(ctx, name, wire.Control{FindSet: slices.Clone(ranks)})
	if err != nil {
		return wire.ProcessSet{}, err
	}
	if answer.Set == nil {
		return wire.ProcessSet{}, c.unexpected(name)
	}
	return *answer.Set, nil
}

// RemoveSet removes a process set. Every worker of the job calls it, and all get the same answer.
func (c *Client) RemoveSet(ctx context.Context, id uint32) error {
	if id == 0 {
		return errors.New("process set 0 is all ranks of the job and cannot be removed")
	}
	_, err := c.call(ctx, fmt.Sprintf("remove process set %d", id), wire.Control{RemoveID: id})
	return err
}

// call makes a collective call, one at a time.
func (c *Client) call(ctx context.Context, name string, m wire.Control) (wire.ProcessSet, error) {
	select {
	case c.setTurn <- struct{}{}:
		defer func() { <-c.setTurn }()
	case <-ctx.Done():
		return wire.ProcessSet{}, fmt.Errorf("%s: another call on process sets has not ended: %w", name, ctx.Err())
	}
	c.mu.Lock()
	m.Position = c.memory.calls
	c.mu.Unlock()
	answer, err := c.ask(ctx, name, m)
	c.mu.Lock()
	c.memory.calls = m.Position + 1 // given up or answered: the next call is another one
	c.mu.Unlock()
	if err != nil {
		return wire.ProcessSet{}, err
	}
	if answer.Set == nil {
		return wire.ProcessSet{}, c.unexpected(name)
	}
	return *answer.Set, nil
}

// Status asks for the state of the scheduler, with a report of each node. A client need not have registered.
func (c *Client) Status(ctx context.Context) (wire.StatusReply, error) {
	m, err := c.ask(ctx, "status", wire.Control{Status: &wire.StatusReply{Detail: true}})
	if err != nil {
		return wire.StatusReply{}, err
	}
	if m.Status == nil {
		return wire.StatusReply{}, c.unexpected("status")
	}
	return *m.Status, nil
}

// Drain asks that a dedicated server leaves the elastic job empty, and waits until it has left: d.Server is its index or its address. A client
// need not have registered. A server asks for itself whether it may, and then says that it is empty.
func (c *Client) Drain(ctx context.Context, d wire.Drain) error {
	_, err := c.ask(ctx, strings.TrimSpace("drain server "+d.Server), wire.Control{Drain: &d})
	return err
}

// Seat asks the launcher of a job of changing size, which has the scheduler. A client need not have registered.
func (c *Client) Seat(ctx context.Context, s wire.Seat) (wire.Seat, error) {
	m, err := c.ask(ctx, "place in the job", wire.Control{Seat: &s})
	if err != nil {
		return wire.Seat{}, err
	}
	if m.Seat == nil {
		return wire.Seat{}, c.unexpected("place in the job")
	}
	return *m.Seat, nil
}

// ReportLost tells the scheduler that this node has lost a peer; it tells all others. Where the line breaks, the next one has the
// report too, until an epoch is without the peer: the scheduler may see no fault of the peer by itself.
func (c *Client) ReportLost(lost wire.Lost) {
	c.mu.Lock()
	c.memory.reports(lost)
	c.mu.Unlock()
	c.push(&wire.Control{Lost: &lost})
}

// Farewell tells the scheduler that this worker has said goodbye to the servers, where its process stays for the one in it: Close says the last goodbye. Where the line
// breaks, the next one has it too.
func (c *Client) Farewell() {
	c.mu.Lock()
	c.memory.farewell = true
	c.mu.Unlock()
	c.push(&wire.Control{Farewell: true})
}

// ReportProfile tells the scheduler what this worker has measured of servers. Where the line is broken, the next report has to do.
func (c *Client) ReportProfile(p wire.Profile) { c.push(&wire.Control{Profile: &p}) }

// push sends a message that has no answer, where there is a line.
func (c *Client) push(m *wire.Control) {
	c.mu.Lock()
	line := c.line
	c.mu.Unlock()
	if line != nil {
		line.Push(m)
	}
}

// ask sends a request and waits for its answer.
func (c *Client) ask(ctx context.Context, name string, m wire.Control) (*wire.Control, error) {
	start := time.Now()
	r := &request{name: name, msg: m, answer: make(chan *wire.Control, 1)}
	r.until, _ = ctx.Deadline()
	id, err := c.submit(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	select {
	case m := <-r.answer:
		switch {
		case m == nil:
			return nil, fmt.Errorf("%s: %w", name, r.err)
		case m.Error != "":
			return nil, &RefusedError{name, c.config.Address, m.Error, m.Missed}
		}
		return m, nil
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.pending, id)
		return nil, fmt.Errorf("%s: waited %v for an answer from %s: %w", name, time.Since(start).Round(time.Millisecond), c.whom(), ctx.Err())
	}
}

// Broken reports whether there is no line to the scheduler.
func (c *Client) Broken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.line == nil
}

// Whom names the scheduler; where there is no line to it, with since when and why.
func (c *Client) Whom() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.whom()
}

// whom is Whom for a caller that holds the lock.
func (c *Client) whom() string {
	who := "the scheduler at " + c.config.Address
	if c.line == nil {
		who += fmt.Sprintf(", to which there has been no line for %v (%v)", time.Since(c.since).Round(time.Millisecond), c.broken)
	}
	return who
}

// submit gives a request its number and sends it, now or when there is a line again.
func (c *Client) submit(r *request) (id uint64, err error) {
	id, line, err := c.enter(r)
	if line != nil { // one that breaks meanwhile is followed by one on which the request is repeated
		line.Push(r.message(id))
	}
	return id, err
}

// enter adds a request to those that wait for an answer.
func (c *Client) enter(r *request) (id uint64, line *Line, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.refused != nil:
		return 0, nil, c.refused
	case c.closing:
		return 0, nil, ErrClosed
	}
	c.lastID++
	c.pending[c.lastID] = r
	return c.lastID, c.line, nil
}

func (c *Client) unexpected(name string) error {
	return fmt.Errorf("%s: the scheduler at %s answered with a message of another kind", name, c.config.Address)
}
