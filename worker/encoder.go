package worker

import (
	"fmt"
	"math"
	"runtime"
	"sync"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

const (
	// encodeAhead bounds the memory of messages that are encoded and have not left, bytes for each server: enough
	// to keep a link busy while the next partition is encoded, little enough that an urgent tensor waits for few
	// others. Each goroutine may go over it by one message.
	encodeAhead = 4 << 20
	// maxEncoders bounds the goroutines that encode.
	maxEncoders = 4
)

// encoder is the stage before the servers' queues, through which coded pushes go:
//
//  1. push queues a task for its server, by priority.
//  2. A goroutine takes the most urgent one of the servers whose messages are not too far ahead.
//  3. The message takes the place of the task's input, and the task goes on to the queue of its server.
//  4. sent gives the message's memory back, when it has left or the server in this process has taken it in.
//     No answer is waited for: it may need messages of other ranks that wait for ours.
type encoder struct {
	e    *Engine
	pool *mempool.Pool // of messages, and scratch memory of both ways

	mu      sync.Mutex
	work    sync.Cond
	lanes   []lane // by server
	running int
	closed  bool
	wg      sync.WaitGroup
}

// lane is what waits to be encoded for one server.
type lane struct {
	queue taskQueue
	ahead int64 // memory of messages that have not left
}

func newEncoder(e *Engine) *encoder {
	n := &encoder{e: e, pool: mempool.New(math.MaxInt64), lanes: make([]lane, len(e.cfg.Roster.Servers))}
	n.work.L = &n.mu
	return n
}

// push queues a task. The first ones start the goroutines.
func (n *encoder) push(t *task) {
	n.mu.Lock()
	if t.abandoned {
		n.settle(t)
		return
	}
	n.lanes[t.server].queue.push(t)
	if n.running < min(maxEncoders, runtime.GOMAXPROCS(0)) && !n.closed {
		n.running++
		n.wg.Go(n.run)
	}
	n.work.Signal()
	n.mu.Unlock()
}

func (n *encoder) run() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for !n.closed {
		t := n.next()
		if t == nil {
			n.work.Wait()
			continue
		}
		n.mu.Unlock()
		err := n.encode(t)
		n.mu.Lock()
		t.state = taskNew
		switch {
		case t.abandoned:
			message := t.unload()
			n.settle(t)
			n.pool.Put(message)
		case err != nil:
			n.mu.Unlock()
			t.o.giveUp(err)
		default:
			n.lanes[t.server].ahead += int64(cap(t.message))
			t.encode = false
			n.mu.Unlock()
			n.pass(t)
		}
		n.mu.Lock()
	}
}

// next takes the most urgent task that may be encoded; among equals the one whose server has the least to
// receive. Callers hold mu.
func (n *encoder) next() *task {
	var from *lane
	var first *task
	for i := range n.lanes {
		l := &n.lanes[i]
		t := l.queue.peek()
		if t == nil || l.ahead >= encodeAhead {
			continue
		}
		if from == nil || t.o.Priority > first.o.Priority || t.o.Priority == first.o.Priority && l.ahead < from.ahead {
			from, first = l, t
		}
	}
	if from == nil {
		return nil
	}
	return from.queue.pop()
}

// encode makes the message of a task.
func (n *encoder) encode(t *task) error {
	k := t.o.d.coding
	p := &k.parts[t.h.Part]
	if p.residual == nil {
		p.residual = make([]byte, k.codec.ResidualBytes(p.elements))
	}
	message, err := n.pool.Get(k.codec.MaxEncoded(p.elements))
	if err != nil {
		return fmt.Errorf("%w: a message of %q on rank %d: %w", ErrMemory, t.o.name(), n.e.cfg.Rank, err)
	}
	in := t.in
	if k.dtype != units.Float32 {
		wide, err := n.pool.Get(4 * p.elements)
		if err != nil {
			n.pool.Put(message)
			return fmt.Errorf("%w: float32 elements of %q on rank %d: %w", ErrMemory, t.o.name(), n.e.cfg.Rank, err)
		}
		defer n.pool.Put(wide)
		reduce.Widen(k.dtype, wide, in)
		in = wide
	}
	s := codec.Stream{Seed: n.e.cfg.Seed, Worker: uint32(n.e.cfg.Rank), Iteration: t.o.d.before + t.o.iteration, Key: p.key}
	if t.o.Kind == units.Accumulate {
		s.Key += t.o.seq // iterations within a superstep have one number
	}
	size := k.codec.Encode(message, in, p.residual, s)
	t.in, t.message = message[:size], message
	t.h.Codec = wire.CodecDeclared
	return nil
}

// pass hands an encoded task on.
func (n *encoder) pass(t *task) {
	if p := n.e.peers[t.server]; p != nil {
		p.push(t)
		p.kick()
		return
	}
	n.e.local.push(t)
}

// sent takes a message's memory back.
func (n *encoder) sent(server int, message []byte) {
	if message == nil {
		return
	}
	n.pool.Put(message)
	n.mu.Lock()
	n.lanes[server].ahead -= int64(cap(message))
	n.work.Signal()
	n.mu.Unlock()
}

// abandon drops a task whose operation has failed, if it is still here.
func (n *encoder) abandon(t *task) bool {
	n.mu.Lock()
	if !t.encode {
		n.mu.Unlock()
		return false
	}
	t.abandoned = true
	if t.state == taskQueued {
		t.state = taskNew // the queue passes it over
	}
	n.settle(t)
	return true
}

// unload takes the message off a task, if it has one. Callers hold the mutex of the task's queue.
func (t *task) unload() []byte {
	message := t.message
	t.message = nil
	return message
}

// settle ends the caller's hold on mu and completes an abandoned task, unless it is being encoded.
func (n *encoder) settle(t *task) {
	done := !t.settled && t.abandoned && t.state < taskMoving
	if done {
		t.settled = true
	}
	n.mu.Unlock()
	if done {
		t.o.complete()
	}
}

// close ends the goroutines. What was queued has been abandoned.
func (n *encoder) close() {
	n.mu.Lock()
	n.closed = true
	n.work.Broadcast()
	n.mu.Unlock()
	n.wg.Wait()
}
