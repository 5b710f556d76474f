// Package outbox sends frames over one connection for many goroutines.
//
//  1. A goroutine puts a frame into a Queue and calls Kick.
//  2. If no other is sending, Kick sends small frames itself, without waiting for the peer. Waking a
//     goroutine costs more than sending a small frame.
//  3. Everything else is sent by the outbox's own goroutine.
//  4. Small frames that wait at the same time are sent in one batch frame and one vectored write.
package outbox

import (
	"math"
	"net"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Owner is told when the memory of a frame may be used again: it was sent, or err says why not.
type Owner interface{ Sent(err error) }

// Frame is one frame to send. Length in the header is set from Payload.
type Frame struct {
	wire.Header
	Payload []byte
	Owner   Owner // may be nil
}

// Queue holds the frames that wait. Its methods are called from any goroutine, never twice at a time for one outbox.
type Queue interface {
	// Pop removes the next frame, if its payload has at most max bytes.
	Pop(max int) (Frame, bool)
	// Waiting reports whether a frame could leave now.
	Waiting() bool
}

// Inline and batch sizes in bytes of payload.
const (
	// inlineMax is the largest payload that the caller of Kick sends itself. Larger ones would delay the
	// caller by more than the sending goroutine needs to wake.
	inlineMax = 32 << 10
	// inlineRounds bounds how many writes one Kick makes before it hands over.
	inlineRounds = 2
)

// LastWords is how long a connection should stay open after sending on it has failed, so that what the peer sent
// before, perhaps its goodbye, is still read. In nearly all cases the reader notices the failure before.
const LastWords = time.Second

// closing is how often an outbox that closes looks whether an inline sender has finished.
const closing = 50 * time.Microsecond

// Outbox sends over one connection.
type Outbox struct {
	conn   transport.Conn
	queue  Queue
	fusion atomic.Int32
	busy   atomic.Bool // somebody is sending; guards all fields below
	wake   chan struct{}
	quit   chan struct{}
	done   chan struct{}
	fail   func(error)

	frames  []Frame
	headers []byte
	buffers net.Buffers
	rest    net.Buffers
	err     error
}

// New makes an outbox and starts its goroutine. Frames with payloads of up to fusion bytes travel
// together. fail is called once, from any goroutine, if sending fails.
func New(conn transport.Conn, queue Queue, fusion int, fail func(error)) *Outbox {
	o := &Outbox{
		conn: conn, queue: queue, fail: fail,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
	o.Fuse(fusion)
	go o.run()
	return o
}

// Fuse has frames with payloads of up to so many bytes travel together from now on.
func (o *Outbox) Fuse(bytes int) { o.fusion.Store(int32(min(bytes, limits.MaxFused))) }

// Kick says that a frame was queued. It never waits for the peer.
func (o *Outbox) Kick() { o.kick(inlineMax, inlineRounds) }

// Push is Kick by a caller that has nothing else to do: it sends large frames too, as far as the connection accepts them
// at once.
func (o *Outbox) Push() { o.kick(limits.MaxPayload, math.MaxInt) }

func (o *Outbox) kick(most, rounds int) {
	for o.queue.Waiting() && o.busy.CompareAndSwap(false, true) {
		if o.sendInline(most, rounds) {
			o.wake <- struct{}{} // never blocks: only the holder of busy sends, and run receives before it releases busy
			return
		}
		o.busy.Store(false)
	}
}

// Close ends the sending goroutine and settles what it was sending. The connection must have been
// closed before, or a send that waits for the peer would not return.
func (o *Outbox) Close() {
	close(o.quit)
	<-o.done
}

// sendInline sends frames with payloads of at most so many bytes, as far as the connection accepts them at once, and
// reports whether the goroutine has to send more.
func (o *Outbox) sendInline(most, rounds int) (more bool) {
	if o.err != nil {
		o.refuse()
		return false
	}
	for range rounds {
		if !o.fill(most) {
			return o.queue.Waiting()
		}
		rest, busy, err := o.conn.TrySend(o.buffers)
		switch {
		case err != nil:
			o.settle(err)
			return true
		case busy:
			o.rest = o.buffers
			return true
		case len(rest) > 0:
			o.rest = rest
			return true
		}
		o.settle(nil)
	}
	return o.queue.Waiting()
}

func (o *Outbox) run() {
	defer close(o.done)
	for {
		select {
		case <-o.wake:
			o.drain()
		case <-o.quit:
			o.close()
			return
		}
	}
}

// drain sends all that waits, then releases busy, and repeats for what was queued in between.
func (o *Outbox) drain() {
	for {
		if len(o.rest) > 0 {
			rest := o.rest
			o.rest = nil
			o.settle(o.conn.Send(rest))
		}
		for o.err == nil && o.fill(limits.MaxPayload) {
			o.settle(o.conn.Send(o.buffers))
		}
		if o.err != nil {
			o.refuse()
		}
		o.busy.Store(false)
		if !o.queue.Waiting() || !o.busy.CompareAndSwap(false, true) {
			return
		}
	}
}

// close waits for an inline sender, which never blocks but may not get a processor, then settles what is left. Later calls of Kick
// refuse their frames.
func (o *Outbox) close() {
	for !o.busy.CompareAndSwap(false, true) {
		select {
		case <-o.wake:
			o.drain()
		default:
			time.Sleep(closing)
		}
	}
	if o.err == nil {
		o.err = net.ErrClosed
	}
	o.drain()
}

// refuse settles everything that waits with the error of the connection.
func (o *Outbox) refuse() {
	for o.fill(limits.MaxPayload) {
		o.settle(o.err)
	}
}

// fill makes the next write: one frame, or several small ones wrapped in a batch frame.
func (o *Outbox) fill(maxFirst int) bool {
	o.frames, o.headers, o.buffers = o.frames[:0], o.headers[:0], o.buffers[:0]
	f, ok := o.queue.Pop(maxFirst)
	if !ok {
		return false
	}
	o.frames = append(o.frames, f)
	total := len(f.Payload)
	fusion := int(o.fusion.Load())
	for len(f.Payload) <= fusion && len(o.frames) < limits.MaxBatched && total <= limits.MaxBatch {
		if f, ok = o.queue.Pop(min(fusion, maxFirst, limits.MaxBatch-total)); !ok {
			break
		}
		o.frames = append(o.frames, f)
		total += len(f.Payload)
	}
	o.encode()
	return true
}

func (o *Outbox) encode() {
	batched := len(o.frames) > 1
	if batched {
		batch := wire.Header{Type: wire.TypeBatch, Length: uint32(len(o.frames) * wire.HeaderSize)}
		o.headers = batch.Append(o.headers)
	}
	data := wire.Header{Type: wire.TypeData}
	for i := range o.frames {
		f := &o.frames[i]
		f.Length = uint32(len(f.Payload))
		o.headers = f.Header.Append(o.headers)
		data.Carry(&f.Header)
	}
	if batched && data.Length > 0 {
		o.headers = data.Append(o.headers)
	}
	o.buffers = append(o.buffers, o.headers)
	for i := range o.frames {
		if p := o.frames[i].Payload; len(p) > 0 {
			o.buffers = append(o.buffers, p)
		}
	}
}

// settle tells the owners of the frames that were being sent.
func (o *Outbox) settle(err error) {
	if err != nil && o.err == nil {
		o.err = err
		o.fail(err)
	}
	for i := range o.frames {
		if owner := o.frames[i].Owner; owner != nil {
			owner.Sent(err)
		}
		o.frames[i] = Frame{}
	}
	o.frames = o.frames[:0]
}
