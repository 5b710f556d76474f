package worker

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/transport/wire"
)

// inlineMax is the largest partition that a submitting goroutine, which does not wait, hands to the local server itself;
// with larger ones it would do the server's work instead of its own.
const inlineMax = 32 << 10

// localQueue is the way to the server in this process.
type localQueue struct {
	e      *Engine
	index  int
	server Local

	mu        lockorder.Mutex
	queue     taskQueue
	announced map[uint32]struct{}
	wake      chan struct{}
	quit      chan struct{}
	done      chan struct{}
}

func newLocalQueue(e *Engine, index int, server Local) *localQueue {
	q := &localQueue{
		e: e, index: index, server: server, announced: map[uint32]struct{}{},
		wake: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
	q.mu.Place(levelWorker, "localQueue")
	go q.run()
	return q
}

func (q *localQueue) String() string {
	return fmt.Sprintf("server %d on this rank", q.index)
}

// mode implements way: the server says of each task when it has done with its memory.
func (q *localQueue) mode(*task) life.Mode { return life.Answered }

// push implements way.
func (q *localQueue) push(t *task) {
	if t.h.Type.OfMessage() { // at once, so that messages keep their order
		if t.begin(life.Queue) && t.begin(life.Move) {
			q.hand(t)
		}
		if t.abandoned() { // perhaps before the server had it
			t.o.withdraw(nil)
		}
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.begin(life.Queue) {
		q.queue.push(t)
	}
}

// kick implements way: the caller hands over what is small, or everything if it waits, the queue's goroutine the rest.
func (q *localQueue) kick(waits bool) {
	if !q.handAll(waits) {
		return
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// handAll hands over all tasks, or the small ones until one is large, and reports whether there is one. What the server
// answers to small ones leaves together.
func (q *localQueue) handAll(large bool) (more bool) {
	t, more := q.next(large)
	for t != nil {
		if !t.small() {
			q.hand(t)
			t, more = q.next(large)
			continue
		}
		q.server.Hold()
		for ; t != nil && t.small(); t, more = q.next(large) {
			q.hand(t)
		}
		q.server.Release()
	}
	return more
}

func (t *task) small() bool { return len(t.in)+len(t.out) <= 2*inlineMax }

// next removes the next task, if it may be large or is not.
func (q *localQueue) next(large bool) (t *task, more bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for t := q.queue.peek(); t != nil; t = q.queue.peek() {
		if !large && !t.small() {
			return nil, true
		}
		if q.queue.pop(life.Move) {
			return t, true
		}
	}
	return nil, false
}

func (q *localQueue) run() {
	defer close(q.done)
	for {
		select {
		case <-q.wake:
		case <-q.quit:
			return
		}
		q.handAll(true)
	}
}

// hand gives a task to the server, which has its memory until it calls finished, but for that of a message: of that
// the server keeps nothing.
func (q *localQueue) hand(t *task) {
	if !t.begin(life.Arrive) { // abandoned since it left the queue
		t.happened(life.Sent)
		return
	}
	err := q.announce(&t.o.d.t)
	if t.finished == nil {
		t.finished = func(h wire.Header, err error) { q.finished(t, h.Rank, err) }
	}
	if err != nil {
		t.finished(wire.Header{}, err)
	} else {
		q.server.Serve(t.h, t.in, t.out, t.finished)
	}
	t.happened(life.Sent)
}

// announce tells the server of a tensor before its first use. Two goroutines may both tell it.
func (q *localQueue) announce(t *wire.Tensor) error {
	if t == &asPieces.t || q.isAnnounced(t.ID) {
		return nil
	}
	if err := q.server.Announce(t); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.announced[t.ID] = struct{}{}
	return nil
}

func (q *localQueue) isAnnounced(tensor uint32) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, announced := q.announced[tensor]
	return announced
}

// forget implements way: nothing is awaited of a task that the server does not have.
func (q *localQueue) forget(*task) {}

// cancel implements way.
func (q *localQueue) cancel(d *declaration, h wire.Header) {
	if q.announce(&d.t) == nil {
		q.server.Cancel(h)
	}
}

// undeclared implements way.
func (q *localQueue) undeclared(_ wire.Header, f wire.Failure) {
	if err := q.server.Undeclared(f); err != nil {
		q.e.cfg.Log.Warn("the server of this rank does not tell the others of a failure", zap.String("tensor", f.Name), zap.Error(err))
	}
}

// withdraw implements way.
func (q *localQueue) withdraw(h wire.Header, abandon func()) {
	abandon()
	q.server.Cancel(h)
}

// report implements way.
func (q *localQueue) report(d *declaration, h wire.Header, iteration wire.Report) error {
	if err := q.announce(&d.t); err != nil {
		return err
	}
	return q.server.Report(h, iteration)
}

// finished is called by the server when it has done with a task's memory. Where it gave the task up, the reason comes
// as a notice of its own.
func (q *localQueue) finished(t *task, last uint16, err error) {
	ends := life.Answer
	switch {
	case err != nil:
		ends = t.failed(last, err)
	case t.h.Type == wire.TypeReceive:
		t.o.out.Value = int(last)
	}
	q.e.observers.answered(t, last)
	t.happened(ends)
}

// failed is how the server in this process ends a task with an error. It stands by itself because errors.As takes memory,
// which an exchange must not.
func (t *task) failed(last uint16, err error) life.Event {
	var refusal wire.Refusal
	if errors.As(err, &refusal) {
		t.o.setErr(t.o.refused(int(last), refusal.Match))
		return life.Answer
	}
	if !errors.Is(err, inprocess.ErrCancelled) {
		t.o.giveUp(err)
	}
	return life.GiveUp
}

// condition implements way.
func (q *localQueue) condition(w wire.Condition) error {
	q.e.conditions.reply(q.server.Condition(w))
	return nil
}

// left implements way: what the server brings here of messages that come in pieces.
func (q *localQueue) left() uint64 { return q.server.Moved() }

// join implements way.
func (q *localQueue) join(h wire.Header) error {
	if h.Flags&wire.FlagOwnWill != 0 {
		q.server.TakeBack()
	} else {
		q.server.Join()
	}
	return nil
}

// lost implements way.
func (q *localQueue) lost(l wire.Lost) []chan struct{} {
	q.server.Lost(l)
	return nil
}

// bye implements way.
func (q *localQueue) bye() []chan struct{} {
	q.server.Bye()
	return nil
}

// reset implements way.
func (q *localQueue) reset() {
	q.mu.Lock()
	clear(q.announced)
	q.mu.Unlock()
}

// close implements way.
func (q *localQueue) close() {
	close(q.quit)
	<-q.done
}
