package worker

import (
	"errors"
	"sync"

	"github.com/paceline/paceline/transport/wire"
)

// inlineMax is the largest partition that the submitting goroutine hands to the local server itself;
// with larger ones it would do the server's work instead of its own.
const inlineMax = 32 << 10

// localQueue is the way to the server in this process.
type localQueue struct {
	e      *Engine
	server Local

	mu        sync.Mutex
	queue     taskQueue
	announced map[uint32]struct{}
	wake      chan struct{}
	quit      chan struct{}
	done      chan struct{}
}

func newLocalQueue(e *Engine, server Local) *localQueue {
	q := &localQueue{
		e: e, server: server, announced: map[uint32]struct{}{},
		wake: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
	go q.run()
	return q
}

// push queues a task; a small one that nothing waits before is done at once.
func (q *localQueue) push(t *task) {
	q.mu.Lock()
	if t.abandoned {
		q.settle(t)
		return
	}
	q.queue.push(t)
	if len(t.in)+len(t.out) <= 2*inlineMax && q.queue.peek() == t {
		q.hand(q.queue.pop())
		return
	}
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *localQueue) run() {
	defer close(q.done)
	for {
		select {
		case <-q.wake:
		case <-q.quit:
			return
		}
		q.mu.Lock()
		for q.queue.peek() != nil {
			q.hand(q.queue.pop())
			q.mu.Lock()
		}
		q.mu.Unlock()
	}
}

// hand gives a task to the server. It ends the caller's hold on mu.
func (q *localQueue) hand(t *task) {
	err := q.announce(&t.o.d.t)
	message := t.unload()
	q.mu.Unlock()
	defer q.e.encoder.sent(t.server, message)
	q.e.trace.moving(t)
	finished := func(_ uint32, err error) { q.finished(t, err) }
	if err != nil {
		finished(0, err)
		return
	}
	switch t.h.Type {
	case wire.TypePush:
		q.server.Push(t.h, t.in, t.out, finished)
	case wire.TypePull:
		q.server.Pull(t.h, t.out, finished)
	case wire.TypePut:
		q.server.Put(t.h, t.in, finished)
	case wire.TypeState:
		q.server.State(t.h, t.out, finished)
	case wire.TypeRestore:
		q.server.Restore(t.h, t.in, finished)
	default:
		q.server.Get(t.h, t.out, finished)
	}
}

// announce tells the server of a tensor before its first use. Callers hold mu.
func (q *localQueue) announce(t *wire.Tensor) error {
	if _, announced := q.announced[t.ID]; announced {
		return nil
	}
	q.announced[t.ID] = struct{}{}
	return q.server.Announce(t)
}

// report tells the server of the end of an iteration with a held value.
func (q *localQueue) report(d *declaration, h wire.Header) error {
	q.mu.Lock()
	err := q.announce(&d.t)
	q.mu.Unlock()
	if err != nil {
		return err
	}
	return q.server.Report(h)
}

// finished is called by the server when it has done with a task's memory. A task that it gave up is
// held back until the reason is known, which comes as a notice of its own.
func (q *localQueue) finished(t *task, err error) {
	if err != nil && !errors.Is(err, wire.ErrCancelled) {
		t.o.giveUp(err)
	}
	q.e.trace.answered(t)
	q.mu.Lock()
	t.state = taskSent
	t.heldBack = err != nil && !t.abandoned
	q.settle(t)
}

// abandon drops a task whose operation has failed, as far as it has not begun.
func (q *localQueue) abandon(t *task) {
	q.mu.Lock()
	t.abandoned = true
	t.heldBack = false
	if t.state == taskQueued {
		t.state = taskNew
	}
	q.settle(t)
}

// settle ends the caller's hold on mu and completes the task if nothing of it is left to do.
func (q *localQueue) settle(t *task) {
	done := !t.settled && !t.heldBack && (t.state == taskSent || t.abandoned && t.state < taskMoving)
	var message []byte
	if done {
		t.settled = true
		message = t.unload()
	}
	q.mu.Unlock()
	if done {
		q.e.encoder.sent(t.server, message)
		t.o.complete()
	}
}

func (q *localQueue) reset() {
	q.mu.Lock()
	clear(q.announced)
	q.mu.Unlock()
}

func (q *localQueue) close() {
	close(q.quit)
	<-q.done
}
