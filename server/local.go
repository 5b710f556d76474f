package server

import (
	"sync"

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
	Stopped(wire.Header, wire.Stop)
}

// Local is the in-process way of the worker that carries this server: its own share of the keys never
// meets a socket. Tensor memory is read where it lies and results are copied to where they belong.
//
// Each request's done is called exactly once, from any goroutine, and only then may its memory be used again.
type Local struct {
	r       *round
	rank    int
	notices Notices

	requests sync.Pool // that are not in use
}

// Local attaches the worker of this process to the running round.
func (s *Server) Local(rank int, notices Notices) (*Local, error) {
	r := s.running()
	if r == nil {
		return nil, errRoundOver
	}
	l := &Local{r: r, rank: rank, notices: notices, requests: sync.Pool{New: func() any { return new(room.Request) }}}
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

// Serve handles a request: in is what a push, put or restore brings, out is where the answer of a push, pull, get or
// state belongs. What is coded (CodecDeclared) is not kept: its memory may be used again when Serve returns.
func (l *Local) Serve(h wire.Header, in, out []byte, done func(answer wire.Header, err error)) {
	q := l.requests.Get().(*room.Request)
	*q = room.Request{Header: h, Payload: room.Lasting(in), Reply: room.Reply{Out: out, Done: done}}
	if h.Codec == wire.CodecDeclared || h.Flags&wire.FlagEmpty != 0 {
		q.Payload = room.Memory(in)
	}
	if err := l.r.serve(q); err != nil {
		done(wire.Header{}, err)
	}
	*q = room.Request{}
	l.requests.Put(q)
}

// Hold keeps what the server answers other ranks back until Release, so that it leaves together.
func (l *Local) Hold() { l.r.cork.hold() }

// Release ends Hold.
func (l *Local) Release() { l.r.cork.release() }

// Report is the worker's end of an iteration under a model with supersteps.
func (l *Local) Report(h wire.Header, iteration wire.Report) error {
	if h.Epoch != l.r.members.Now().Joins {
		return nil // all ranks have joined meanwhile, and nothing is held any more
	}
	return l.r.report(&h, iteration)
}

// Cancel gives up a tensor from an iteration on, or one end of a message.
func (l *Local) Cancel(h wire.Header) {
	if h.Type == wire.TypeWithdraw {
		_ = l.r.messages.Serve(&room.Request{Header: h}) // it is the worker's own, and right
		return
	}
	l.r.cancel(&h)
}

// Undeclared gives up an operation whose tensor the worker has not declared.
func (l *Local) Undeclared(f wire.Failure) error { return l.r.undeclared(l.rank, &f) }

// Moved is how many bytes of messages have come in pieces.
func (l *Local) Moved() uint64 { return l.r.messages.Moved() }

// Join says that the local worker has no more data.
func (l *Local) Join() { l.r.join(l.rank) }

// TakeBack says that joins fail, to a server that sums for its host.
func (l *Local) TakeBack() { l.r.takeBack() }

// AllJoined says that every rank of the job has joined, to a server that sums for its host.
func (l *Local) AllJoined(last int) {
	l.r.hostJoined(func(h *hostJoin) { h.job, h.last = true, last })
}

// Bye says that the local worker leaves.
func (l *Local) Bye() { l.r.bye(l.rank) }

// Lost says that the local worker ends because it has lost a peer.
func (l *Local) Lost(lost wire.Lost) { l.r.lose(lost) }
