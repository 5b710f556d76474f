package worker

import (
	"fmt"
	"math"
	"runtime"
	"sync"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/lockorder"
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
//  2. A goroutine encodes the most urgent one of the servers whose messages are not too far ahead.
//  3. The message replaces the task's input, and the task goes on to the queue of its server.
//  4. sent gives the message's memory back, when it has left or the server in this process has read it.
//     No answer is waited for: it may need messages of other ranks that wait for ours.
type encoder struct {
	e    *Engine
	pool *mempool.Pool // of messages, and scratch memory of both ways

	mu      lockorder.Mutex
	work    sync.Cond
	lanes   lanes
	running int
	closed  bool
	wg      sync.WaitGroup
}

// lanes are what waits to be encoded for each server.
type lanes []lane

type lane struct {
	queue taskQueue
	ahead int64 // memory of messages that have not left
}

// next removes the most urgent task that may be encoded; among equals the one whose server has the least to receive.
func (l lanes) next() *task {
	for {
		var from *lane
		var first *task
		for i := range l {
			t := l[i].queue.peek()
			if t == nil || l[i].ahead >= encodeAhead {
				continue
			}
			if t.before(first) || first != nil && t.o.Priority == first.o.Priority && l[i].ahead < from.ahead {
				from, first = &l[i], t
			}
		}
		if from == nil || from.queue.pop(life.Encode) {
			return first
		}
	}
}

func newEncoder(e *Engine) *encoder {
	n := &encoder{e: e, pool: mempool.New(math.MaxInt64), lanes: make(lanes, len(e.epoch().Servers))}
	n.mu.Place(levelWorker, "encoder")
	n.work.L = &n.mu
	return n
}

// reach adds the lanes of servers that have joined.
func (n *encoder) reach(servers int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if more := servers - len(n.lanes); more > 0 {
		n.lanes = append(n.lanes, make(lanes, more)...)
	}
}

// push queues a task. The first ones start the goroutines.
func (n *encoder) push(t *task) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lanes[t.server].queue.push(t)
	if n.running < min(maxEncoders, runtime.GOMAXPROCS(0)) && !n.closed {
		n.running++
		n.wg.Go(n.run)
	}
	n.work.Signal()
}

func (n *encoder) run() {
	for t := n.wait(); t != nil; t = n.wait() {
		if err := n.encode(t); err != nil {
			t.happened(life.EncodeFailed)
			t.o.giveUp(err)
			continue
		}
		n.made(t)
		t.happened(life.Encoded)
		n.pass(t)
	}
}

// wait gives the next task to encode; nil when the encoder is closed.
func (n *encoder) wait() *task {
	n.mu.Lock()
	defer n.mu.Unlock()
	for !n.closed {
		if t := n.lanes.next(); t != nil {
			return t
		}
		n.work.Wait()
	}
	return nil
}

// encode makes the message of a task.
func (n *encoder) encode(t *task) error {
	k := t.o.d.coding
	p := &k.parts[t.h.Part]
	if bytes := k.codec.ResidualBytes(p.elements); bytes > 0 && p.residual == nil {
		p.residual = make([]byte, bytes)
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

// made counts the memory of a message.
func (n *encoder) made(t *task) {
	n.mu.Lock()
	defer n.mu.Unlock()
	t.ahead = int64(cap(t.message))
	n.lanes[t.server].ahead += t.ahead
}

// pass hands an encoded task on.
func (n *encoder) pass(t *task) {
	w := t.way()
	w.push(t)
	w.kick(false)
}

// sent returns a message's memory to the pool.
func (n *encoder) sent(t *task) {
	if t.message == nil {
		return
	}
	n.pool.Put(t.message)
	t.message = nil
	n.left(t)
}

// left has a message count as one that has left, whether its memory is kept or not.
func (n *encoder) left(t *task) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lanes[t.server].ahead -= t.ahead
	t.ahead = 0
	n.work.Signal()
}

// close ends the goroutines. What was queued has been abandoned.
func (n *encoder) close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.work.Broadcast()
	n.wg.Wait()
}
