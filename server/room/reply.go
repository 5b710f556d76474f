package room

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/transport/wire"
)

// Reply is the place for the answer to a request. A rank elsewhere gets a frame, by To. The worker in this process
// finds the answer in Out when Done is called, with the header that a rank elsewhere gets; that is exactly once, from
// any goroutine, and only then may the memory of its request be used again. The zero Reply is nobody's.
type Reply struct {
	To       Sender
	Priority int // of the answer, among those that wait to leave To
	Out      []byte
	Done     func(answer wire.Header, err error)
}

// Sender sends answers to one rank. Many requests may share one, which is free to send their answers together.
type Sender interface {
	// Send queues a frame and never waits for the peer. The payload is read until owner, which may be nil, is told. Of results that wait
	// next to each other those with the highest priority leave first.
	Send(h wire.Header, payload []byte, owner Owner, priority int)
}

// Owner is told when the memory of an answer may be used again: it was sent, or err says why not.
type Owner interface{ Sent(err error) }

// Local reports whether the answer goes to the worker in this process.
func (r Reply) Local() bool { return r.Done != nil }

// Confirm answers without a payload.
func (r Reply) Confirm(h wire.Header) {
	switch {
	case r.To != nil:
		r.To.Send(h, nil, nil, r.Priority)
	case r.Done != nil:
		r.Done(h, nil)
	}
}

// Moved answers a request, of which it repeats the header, that its partition has been moved to another server.
func (r Reply) Moved(h wire.Header) {
	h.Type, h.Flags, h.Length = wire.TypeMoved, 0, 0
	r.Confirm(h)
}

// Release gives the worker in this process the memory of a request back that has no answer.
func (r Reply) Release() {
	if r.Done != nil {
		r.Done(wire.Header{}, nil)
	}
}

// Deliver answers with a result that fill writes to Out: without a payload where there is none to share.
func (r Reply) Deliver(h wire.Header, result *Buffer, fill func(h wire.Header, out, result []byte) error) {
	switch {
	case result == nil:
		r.Confirm(h)
	case r.To != nil:
		r.To.Send(h, result.Bytes, result, r.Priority)
	case r.Done != nil:
		err := fill(h, r.Out, result.Bytes)
		result.Sent(nil)
		r.Done(h, err)
	}
}

// Fail ends an operation of the worker in this process; ranks elsewhere hear of failures by the operation's name.
func (r Reply) Fail(err error) {
	if r.Done != nil {
		r.Done(wire.Header{}, err)
	}
}

// Send answers with bytes as they are: in a frame, or copied to Out.
func (r Reply) Send(h wire.Header, payload []byte, owner Owner) {
	switch {
	case r.To != nil:
		r.To.Send(h, payload, owner, r.Priority)
	case r.Done != nil:
		var err error
		if copy(r.Out, payload); len(r.Out) != len(payload) {
			err = fmt.Errorf("%d bytes arrived where %d were expected", len(payload), len(r.Out))
		}
		owner.Sent(nil)
		r.Done(h, err)
	}
}

// Buffer is lent memory that is shared by all who send it, and goes back to its pool with the last of them.
type Buffer struct {
	Bytes []byte
	pool  *mempool.Pool
	users atomic.Int32
}

// buffers are those that nobody uses, so that an answer leaves no garbage.
var buffers = sync.Pool{New: func() any { return new(Buffer) }}

// NewBuffer is a buffer with one user.
func NewBuffer(pool *mempool.Pool, b []byte) *Buffer {
	buf := buffers.Get().(*Buffer)
	buf.Bytes, buf.pool = b, pool
	buf.users.Store(1)
	return buf
}

// Share adds a user.
func (b *Buffer) Share() *Buffer {
	b.users.Add(1)
	return b
}

// Shared reports whether somebody else uses the buffer beside the caller.
func (b *Buffer) Shared() bool { return b.users.Load() > 1 }

// Sent implements Owner: there is one user less.
func (b *Buffer) Sent(error) {
	if b.users.Add(-1) == 0 {
		b.pool.Put(b.Bytes)
		b.Bytes = nil
		buffers.Put(b)
	}
}
