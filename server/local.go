package server

import (
	"fmt"

	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Notices is what the server tells the worker in its own process, as it tells others by frames.
// The calls must return soon and not call back into the server on the same goroutine's stack with
// locks of their own held.
type Notices interface {
	Failed(wire.Failure)
	Stalled(wire.Stall)
	Joined(last int)
	Lost(wire.Lost)
	Stopped(wire.Header)
}

// Local is the in-process way of the worker that carries this server: its own share of the keys never
// meets a socket. Tensor memory is read where it lies and results are copied to where they belong.
//
// Each operation's done is called exactly once, from any goroutine, and only then may its memory be
// used again.
type Local struct {
	r       *round
	rank    int
	notices Notices
}

// localOp is one operation of the local worker on one partition.
type localOp struct {
	rank   int
	in     []byte
	out    []byte
	noPull bool
	done   func(divisor uint32, err error)
}

// Local attaches the worker of this process to the running round.
func (s *Server) Local(rank int, notices Notices) (*Local, error) {
	s.mu.Lock()
	r := s.round
	s.mu.Unlock()
	if r == nil {
		return nil, errRoundOver
	}
	l := &Local{r: r, rank: rank, notices: notices}
	r.mu.Lock()
	r.local = l
	lost := r.lost
	r.mu.Unlock()
	if lost != nil {
		notices.Lost(*lost)
	}
	return l, nil
}

// Announce tells of a tensor before its first use.
func (l *Local) Announce(t *wire.Tensor) error { return l.r.announce(t) }

// Push adds in to the key that the header names and, unless FlagNoPull is set, has the result copied to out.
// A message (CodecDeclared) is not kept: its memory may be used again when Push returns.
func (l *Local) Push(h wire.Header, in, out []byte, done func(divisor uint32, err error)) {
	t, err := l.r.tensor(&h)
	if err == nil && t.Held() {
		t.addLocal(&h, in, out, done)
		return
	}
	var k *key
	if err == nil {
		k, err = t.key(h.Part)
	}
	if err == nil {
		err = k.fits(&h, len(in))
	}
	if err != nil {
		done(0, err)
		return
	}
	if !t.enter(&h) {
		done(0, wire.ErrCancelled)
		return
	}
	s, err := k.open(&h)
	if err != nil {
		t.OutOfMemory(&h, room.MemoryError{Err: err})
		done(0, wire.ErrCancelled)
		return
	}
	op := &localOp{rank: l.rank, in: in, out: out, noPull: h.Flags&wire.FlagNoPull != 0, done: done}
	if s == nil {
		k.late(&h, waiter{rank: l.rank, local: op})
		return
	}
	if k.coding != nil || h.Flags&wire.FlagEmpty != 0 {
		if h.Flags&wire.FlagEmpty == 0 {
			k.receiveLocal(s, &h, in)
		}
		k.pushed(&h, s, waiter{rank: l.rank, local: op})
		return
	}
	k.mu.Lock()
	if k.slots[h.Iteration] != s {
		k.mu.Unlock()
		done(0, wire.ErrCancelled)
		return
	}
	if !s.closed {
		s.local = op
		if !t.Whole {
			k.addLocal(s, false)
		}
	}
	answers := k.arrived(&h, s, waiter{rank: l.rank, local: op})
	k.mu.Unlock()
	k.deliver(answers)
}

// Pull has a held value copied to out.
func (l *Local) Pull(h wire.Header, out []byte, done func(divisor uint32, err error)) {
	if t, ok := l.enter(&h, done); ok {
		t.readLocal(&h, out, done)
	}
}

// Put keeps data, where it lies, until every reader has got it.
func (l *Local) Put(h wire.Header, data []byte, done func(divisor uint32, err error)) {
	l.serve(room.Request{Header: h, Payload: room.Lasting(data), Reply: room.Reply{Done: done}})
}

// Get has a partition that somebody puts copied to out.
func (l *Local) Get(h wire.Header, out []byte, done func(divisor uint32, err error)) {
	l.serve(room.Request{Header: h, Reply: room.Reply{Out: out, Done: done}})
}

func (l *Local) serve(q room.Request) {
	if err := l.r.serve(&q); err != nil {
		q.Reply.Fail(err)
	}
}

// Cancel gives up a tensor from an iteration on.
func (l *Local) Cancel(h wire.Header) { l.r.cancel(&h) }

// Join says that the local worker has no more data.
func (l *Local) Join() { l.r.join(l.rank) }

// Bye says that the local worker leaves.
func (l *Local) Bye() { l.r.bye(l.rank) }

// Lost says that the local worker ends because it has lost a peer.
func (l *Local) Lost(lost wire.Lost) { l.r.lose(lost) }

func (l *Local) enter(h *wire.Header, done func(uint32, error)) (*tensor, bool) {
	t, err := l.r.tensor(h)
	if err == nil && !t.enter(h) {
		err = wire.ErrCancelled
	}
	if err != nil {
		done(0, err)
		return nil, false
	}
	return t, true
}

// take copies an item to where the reader wants it.
func (op *localOp) take(data []byte) error {
	if len(data) != len(op.out) {
		return fmt.Errorf("%d bytes arrived where %d were expected", len(data), len(op.out))
	}
	copy(op.out, data)
	return nil
}
