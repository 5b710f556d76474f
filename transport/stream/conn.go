// Package stream makes authenticated connections that carry frames (transport.Conn) of any byte stream:
// sockets, TLS, the simulated links of transporttest. A backend over byte streams only listens and
// connects.
package stream

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// ReadAhead is how much is read ahead in bytes: a header and a small payload arrive in one read. Larger payloads go straight
// to their destination: all bytes that a longer read asks for are on their way.
const ReadAhead = 8 << 10

// TryWriter is a byte stream that can write without waiting for the peer.
type TryWriter interface {
	// TryWrite writes as much of the buffers as fits now and returns the number of bytes. It changes
	// neither the slice nor its elements.
	TryWrite(buffers net.Buffers) (int, error)
}

// BuffersWriter is a byte stream that writes several buffers in one call.
type BuffersWriter interface {
	WriteBuffers(buffers *net.Buffers) error
}

// Conn is a transport.Conn over a byte stream. Neither sending nor reading allocates.
type Conn struct {
	nc    net.Conn
	peer  string
	try   TryWriter     // nil if nc is not one
	whole BuffersWriter // nil if nc is not one
	turn  *turn
	out   net.Buffers // what is being sent; owned by the sender that has the turn
	tags  *tagger     // nil where the stream protects its bytes

	in    *bufio.Reader
	left  uint32   // bytes of the current payload that were not given out yet
	check *checker // nil where the stream protects its bytes

	aside byte // its address identifies Aside as a sender to turn

	watch *watch // nil where nobody does
	pulse pulse

	once  sync.Once
	cause atomic.Pointer[error] // why sending ended: the first reason
}

func newConn(nc net.Conn, session *auth.Session) *Conn {
	c := &Conn{nc: nc, peer: nc.RemoteAddr().String(), turn: newTurn()}
	c.in = bufio.NewReaderSize(waited{nc, &c.pulse}, ReadAhead)
	c.try, _ = nc.(TryWriter)
	c.whole, _ = nc.(BuffersWriter)
	if session.Out != nil {
		c.tags = newTagger(session.Out, session.All)
		c.check = &checker{tags: session.In, all: session.All}
	}
	return c
}

// Send implements transport.Conn. The address of its first byte identifies the rest of a TrySend.
func (c *Conn) Send(buffers net.Buffers) error {
	buffers = skipEmpty(buffers)
	if len(buffers) == 0 {
		return c.ended()
	}
	resumes, ok := c.turn.wait(&buffers[0][0])
	if !ok {
		return c.ended()
	}
	defer c.turn.give()
	if err := c.ended(); err != nil {
		return err
	}
	c.pulse.sends.Add(1)
	if err := c.send(buffers, resumes); err != nil {
		return c.sendFailed(err)
	}
	return nil
}

// send writes buffers, with tags unless they are a rest, which has its tags.
func (c *Conn) send(buffers net.Buffers, rest bool) error {
	if c.tags == nil || rest {
		return c.write(buffers)
	}
	for len(buffers) > 0 {
		var tagged net.Buffers
		tagged, buffers = c.tags.next(buffers, burst)
		if err := c.write(tagged); err != nil {
			return err
		}
	}
	return nil
}

func (c *Conn) write(buffers net.Buffers) (err error) {
	c.out = buffers
	if c.whole != nil {
		err = c.whole.WriteBuffers(&c.out)
	} else {
		_, err = c.out.WriteTo(c.nc)
	}
	c.out = nil
	return err
}

// TrySend implements transport.Conn. Over a stream that cannot write without waiting, such as TLS, it
// takes the turn and returns everything as the rest.
func (c *Conn) TrySend(buffers net.Buffers) (rest net.Buffers, busy bool, err error) {
	buffers = skipEmpty(buffers)
	if err := c.ended(); err != nil || len(buffers) == 0 {
		return nil, false, err
	}
	resumes, ok := c.turn.try(&buffers[0][0])
	if !ok {
		return buffers, true, nil
	}
	c.pulse.sends.Add(1)
	if c.tags != nil && !resumes {
		buffers, _ = c.tags.next(buffers, math.MaxInt)
	}
	if c.try != nil {
		n, err := c.try.TryWrite(buffers)
		if err != nil {
			err = c.sendFailed(err)
			c.turn.give()
			return nil, false, err
		}
		buffers = Consume(buffers, n)
	}
	if len(buffers) == 0 {
		c.turn.give()
		return nil, false, nil
	}
	c.turn.keep(&buffers[0][0])
	return buffers, false, nil
}

// Aside has f write something other than a frame to the stream, in order with sends and never amid one. An error of f ends sending.
func (c *Conn) Aside(f func() error) error {
	if _, ok := c.turn.wait(&c.aside); !ok {
		return c.ended()
	}
	defer c.turn.give()
	if err := c.ended(); err != nil {
		return err
	}
	c.pulse.sends.Add(1)
	if err := f(); err != nil {
		return c.sendFailed(err)
	}
	return nil
}

// NetConn is the underlying stream.
func (c *Conn) NetConn() net.Conn { return c.nc }

// ReadHeader implements transport.Conn. It passes over beats.
func (c *Conn) ReadHeader(h *wire.Header) error {
	for {
		if err := c.readHeader(h); err != nil || h.Type != wire.TypeBeat {
			return err
		}
	}
}

func (c *Conn) readHeader(h *wire.Header) error {
	if c.left > 0 {
		return fmt.Errorf("reading a header from %s while %d bytes of the previous payload are unread", c.peer, c.left)
	}
	size := wire.HeaderSize
	if c.check != nil {
		size += wire.TagSize
	}
	b, err := c.in.Peek(size)
	if err != nil {
		if len(b) > 0 {
			err = inside(err)
		}
		return c.readFailed(err)
	}
	if c.check != nil {
		err = c.check.header(b[:wire.HeaderSize], b[wire.HeaderSize:])
	}
	if err == nil {
		err = h.Decode(b)
	}
	if err != nil {
		return c.refuse(err)
	}
	c.left = h.Length
	_, err = c.in.Discard(size) // cannot fail: these bytes were peeked at
	return err
}

// refuse ends sending on a connection with bytes that its peer should not have sent. It does not close the stream: the
// reader does, once it has told why, before the peer sees the end and tells its own reason.
func (c *Conn) refuse(err error) error {
	err = fmt.Errorf("connection with %s closed: %w", c.peer, err)
	c.cause.CompareAndSwap(nil, &err)
	return err
}

// ReadPayload implements transport.Conn.
func (c *Conn) ReadPayload(b []byte) error {
	if uint64(len(b)) > uint64(c.left) {
		return fmt.Errorf("reading %d bytes from %s where the payload has %d left", len(b), c.peer, c.left)
	}
	c.left -= uint32(len(b))
	if c.check == nil || c.check.plain {
		return c.fill(b)
	}
	for len(b) > 0 {
		if len(c.check.ready) == 0 && len(b) >= c.check.next() {
			n := c.check.next()
			if err := c.chunk(b[:n]); err != nil {
				return err
			}
			b = b[n:]
			continue
		}
		if len(c.check.ready) == 0 {
			chunk := c.check.room(c.check.next())
			if err := c.chunk(chunk); err != nil {
				return err
			}
			c.check.ready = chunk
		}
		n := copy(b, c.check.ready)
		b, c.check.ready = b[n:], c.check.ready[n:]
	}
	return nil
}

// chunk reads the next chunk of a payload and checks it.
func (c *Conn) chunk(b []byte) error {
	if err := c.fill(b); err != nil {
		return err
	}
	tag, err := c.in.Peek(wire.TagSize)
	if err != nil {
		return c.readFailed(inside(err))
	}
	if err := c.check.payload(b, tag); err != nil {
		return c.refuse(err)
	}
	_, err = c.in.Discard(wire.TagSize) // cannot fail: these bytes were peeked at
	return err
}

// fill reads the next bytes of a payload.
func (c *Conn) fill(b []byte) error {
	if _, err := io.ReadFull(c.in, b); err != nil {
		return c.readFailed(inside(err))
	}
	return nil
}

// inside is the error of a read in the middle of a frame.
func inside(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// Lends implements transport.Lender, as do Borrow and Return, where the stream does.
func (c *Conn) Lends() transport.Arena {
	if l, ok := c.nc.(transport.Lender); ok {
		return l.Lends()
	}
	return nil
}

// Borrow implements transport.Lender.
func (c *Conn) Borrow(offset, length uint64) ([]byte, error) {
	if l, ok := c.nc.(transport.Lender); ok {
		return l.Borrow(offset, length)
	}
	return nil, errors.New("this kind of connection lends no memory")
}

// Return implements transport.Lender.
func (c *Conn) Return() { c.nc.(transport.Lender).Return() }

// RemoteAddr implements transport.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// Close implements transport.Conn.
func (c *Conn) Close() error {
	c.end(fmt.Errorf("connection with %s: %w on this side", c.peer, net.ErrClosed))
	return nil
}

// end closes the connection. Later sends and reads fail with the reason.
func (c *Conn) end(reason error) {
	c.once.Do(func() {
		c.cause.CompareAndSwap(nil, &reason)
		close(c.turn.over)
		c.nc.Close() // an error would mean that the peer closed first; callers do not need it
		if c.watch != nil {
			c.watch.remove(c)
		}
	})
}

// ended is why sending ended, or nil.
func (c *Conn) ended() error {
	if cause := c.cause.Load(); cause != nil {
		return *cause
	}
	return nil
}

// sendFailed records why sending ended. The stream stays open for reading what the peer had sent before,
// possibly its goodbye.
func (c *Conn) sendFailed(err error) error {
	reason := c.describe("sending to", err)
	c.cause.CompareAndSwap(nil, &reason)
	return c.ended()
}

// readFailed is the error of a failed read. The kernel reports a failure once, to a sender or a reader; the
// first one records it for the other.
func (c *Conn) readFailed(err error) error {
	reason := c.describe("reading from", err)
	if sent := c.ended(); errors.Is(err, io.EOF) && (sent == nil || errors.Is(sent, syscall.EPIPE)) {
		return reason // a send, perhaps a beat, that found the peer gone says no more than the peer's close
	}
	c.cause.CompareAndSwap(nil, &reason)
	return c.ended()
}

// describe is the error of the role that uses the connection.
func (c *Conn) describe(doing string, err error) error {
	err = describe(doing, c.peer, err)
	if c.watch == nil {
		return err
	}
	if d := c.watch.stopped(); d > 0 {
		err = fmt.Errorf("%w (%w for %v)", err, transport.ErrStopped, d.Round(100*time.Millisecond))
	}
	return err
}

func describe(doing, peer string, err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s closed the connection: %w", peer, io.EOF)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s closed the connection in the middle of a frame or a write: %w", peer, io.ErrUnexpectedEOF)
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%s %s: the peer closed without finishing: %w", doing, peer, err)
	case errors.Is(err, syscall.ETIMEDOUT), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s %s: the peer or the network to it no longer answers: %w", doing, peer, err)
	case errors.Is(err, syscall.ECONNABORTED):
		return fmt.Errorf("%s %s: the connection broke: %w", doing, peer, err)
	default:
		return fmt.Errorf("%s %s: %w", doing, peer, err)
	}
}
