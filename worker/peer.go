package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// peer is one server that this worker reaches over connections.
//
// Invariant: inFlight is the number of tensor bytes that have been given to the connections and that
// the server has not reported as consumed. No task leaves while it is at the credit or above, so that an
// urgent one never waits behind more than that.
type peer struct {
	e     *Engine
	index int
	node  wire.Node

	mu       sync.Mutex
	links    []*link
	queue    taskQueue
	answers  map[answerID]*task
	unsent   []*task // that a broken connection did not take
	inFlight int64
	left     bool  // the server said goodbye
	gone     error // it has closed since; what still wants it fails
}

type answerID struct {
	tensor    uint32
	part      uint32
	iteration uint64
	aux       uint64
}

func idOf(h *wire.Header) answerID { return answerID{h.Tensor, h.Part, h.Iteration, h.Aux} }

func newPeer(e *Engine, index int, node wire.Node) *peer {
	return &peer{e: e, index: index, node: node, answers: map[answerID]*task{}}
}

func (p *peer) String() string {
	return fmt.Sprintf("server %d (%s %d on host %s at %v)", p.index, p.node.Role, p.node.Rank, p.node.Host, p.node.Addresses)
}

// connect opens all connections to the server.
func (p *peer) connect(ctx context.Context) error {
	for range p.e.cfg.Conns {
		l, err := p.dial(ctx)
		if err != nil {
			return fmt.Errorf("rank %d cannot reach %v: %w", p.e.cfg.Rank, p, err)
		}
		p.mu.Lock()
		p.links = append(p.links, l)
		p.mu.Unlock()
	}
	p.e.wg.Add(len(p.links))
	for _, l := range p.links {
		go l.read()
	}
	return nil
}

// push queues a task and makes ready for its answer.
func (p *peer) push(t *task) {
	p.mu.Lock()
	if gone := p.gone; gone != nil && !t.abandoned {
		p.mu.Unlock()
		t.o.fail(gone)
		p.abandon(t)
		return
	}
	if t.abandoned {
		p.settle(t)
		return
	}
	if t.answer {
		p.answers[idOf(&t.h)] = t
		t.waiting = true
	}
	p.queueOf(t).push(t)
	p.mu.Unlock()
}

// queueOf is where a task waits. What a rank does with one partition of a held value takes one connection, so that
// a read does not overtake the push before it; all else takes any. Callers hold mu.
func (p *peer) queueOf(t *task) *taskQueue {
	if t.o.Kind != units.Accumulate || len(p.links) < 2 {
		return &p.queue
	}
	return &p.links[(t.h.Tensor+t.h.Part)%uint32(len(p.links))].queue
}

// leave fails what still waits for a server that has left on purpose. A join needs every server.
func (p *peer) leave(err error) {
	p.mu.Lock()
	p.gone = err
	tasks := slices.Concat(p.queue.tasks, p.unsent, slices.Collect(maps.Values(p.answers)))
	for _, l := range p.links {
		tasks = append(tasks, l.queue.tasks...)
	}
	p.mu.Unlock()
	for _, t := range tasks {
		t.o.fail(err)
	}
	p.e.failJoin(err)
}

// kick has the connections look at the queue.
func (p *peer) kick() {
	for _, l := range p.links {
		l.out.Kick()
	}
}

// settle ends the caller's hold on mu and completes the task if nothing of it is left to do.
func (p *peer) settle(t *task) {
	done := !t.settled && !t.waiting && (t.state == taskSent || t.abandoned && t.state < taskMoving)
	var message []byte
	if done {
		t.settled = true
		message = t.unload()
	}
	p.mu.Unlock()
	if done {
		p.e.encoder.sent(t.server, message)
		t.o.complete()
	}
}

// Sent implements outbox.Owner: the task's memory has left, or the connection has failed. Why, and so what
// becomes of the operation, is for the connection's reader to find out: there may be a goodbye to read.
func (t *task) Sent(err error) {
	p := t.o.e.peers[t.server]
	p.mu.Lock()
	t.state = taskSent
	gone := p.gone
	message := t.unload()
	if err != nil {
		t.state = taskNew
		p.unsent = append(p.unsent, t)
	}
	p.settle(t)
	p.e.encoder.sent(t.server, message)
	if err != nil && gone != nil {
		t.o.fail(gone)
	}
}

// lossOf says of a connection's error which server it was to.
func (e *Engine) lossOf(server int, err error) error {
	if broken := e.Err(); broken != nil {
		return broken
	}
	return fmt.Errorf("%w: %v: %w", ErrPeerLost, e.peers[server], err)
}

// abandon drops a task whose operation has failed, as far as it has not begun.
func (p *peer) abandon(t *task) {
	p.mu.Lock()
	t.abandoned = true
	if t.state == taskQueued {
		t.state = taskNew // the queue passes it over
	}
	if t.waiting && p.answers[idOf(&t.h)] == t {
		delete(p.answers, idOf(&t.h))
		t.waiting = false
	}
	p.settle(t)
}

// take finds the task that an answer belongs to; nil if nobody waits for it any more. Its memory is
// the caller's to write until answered.
func (p *peer) take(h *wire.Header) *task {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.answers[idOf(h)]
	if t != nil {
		delete(p.answers, idOf(h))
	}
	return t
}

// answered says that the task's answer has been read, or why not.
func (p *peer) answered(t *task, err error) {
	if err != nil {
		t.o.setErr(err)
	}
	p.mu.Lock()
	t.waiting = false
	p.settle(t)
}

// control queues a frame without payload that goes before all tasks.
func (p *peer) control(h wire.Header) { p.send(outbox.Frame{Header: h}) }

func (p *peer) send(f outbox.Frame) {
	p.mu.Lock()
	if len(p.links) == 0 {
		p.mu.Unlock()
		return
	}
	l := p.links[0]
	l.control = append(l.control, f)
	p.mu.Unlock()
	l.out.Kick()
}

// report queues the end of an iteration with a held value, behind the value's announcement.
func (p *peer) report(d *declaration, h wire.Header) {
	p.mu.Lock()
	if len(p.links) == 0 {
		p.mu.Unlock()
		return
	}
	l := p.links[0]
	if _, announced := l.announced[h.Tensor]; !announced {
		l.announced[h.Tensor] = struct{}{}
		l.control = append(l.control, announcement(&d.t, p.e.cfg.Rank))
	}
	l.control = append(l.control, outbox.Frame{Header: h})
	p.mu.Unlock()
	l.out.Kick()
}

// everywhere queues a frame without payload on every connection. The error is that of a server that has left.
func (p *peer) everywhere(h wire.Header) error {
	p.mu.Lock()
	for _, l := range p.links {
		l.control = append(l.control, outbox.Frame{Header: h})
	}
	gone := p.gone
	p.mu.Unlock()
	p.kick()
	return gone
}

// last queues the last frame of every connection, and tells when each has left.
func (p *peer) last(f outbox.Frame) []chan struct{} {
	var sent []chan struct{}
	p.mu.Lock()
	for _, l := range p.links {
		done := make(chan struct{})
		f.Owner = closing{done}
		l.control = append(l.control, f)
		sent = append(sent, done)
	}
	p.mu.Unlock()
	p.kick()
	return sent
}

type closing struct{ done chan struct{} }

// Sent implements outbox.Owner.
func (c closing) Sent(error) { close(c.done) }

// close ends the connections; what was being sent or read is settled.
func (p *peer) close() {
	p.mu.Lock()
	links := p.links
	p.mu.Unlock()
	for _, l := range links {
		_ = l.conn.Close()
	}
	for _, l := range links {
		l.out.Close()
	}
}

// reset forgets which tensors the server has been told of.
func (p *peer) reset() {
	p.mu.Lock()
	for _, l := range p.links {
		clear(l.announced)
	}
	p.mu.Unlock()
}

// announcement is the frame that tells the server of a tensor.
func announcement(t *wire.Tensor, rank int) outbox.Frame {
	data, err := json.Marshal(t)
	if err != nil {
		panic(err) // a struct of numbers and strings; NaN scales are refused at submission
	}
	return outbox.Frame{Header: wire.Header{Type: wire.TypeAnnounce, Rank: uint32(rank), Tensor: t.ID}, Payload: data}
}
