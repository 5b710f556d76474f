package shm

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

// conn is a byte stream over two rings: a net.Conn, stream.TryWriter and stream.BuffersWriter. One goroutine reads, one writes.
type conn struct {
	*socket
	shared   *segment
	in       receiver
	out      sender
	reads    *waiter
	sends    *waiter
	patience time.Duration // for a peer that takes nothing
	lends    *Arena        // the arena of this process, which the peer has mapped; else nil
	borrowed *borrowed     // that of the peer; nil for none

	over  atomic.Bool  // the peer is gone, or this end is closed
	ended atomic.Bool  // this end is closed
	users atomic.Int32 // of the shared memory: the goroutines in it, the one that watches the socket, and one until Close
}

// start takes the segment into use.
func (c *conn) start() {
	g := c.shared
	mine, theirs, first := g.bells[:dialerReads], g.bells[dialerReads:], 0
	if !g.made {
		mine, theirs, first = theirs, mine, 1
	}
	c.out = sender{ring: g.ring(first), reader: bell(theirs[0])}
	c.in = receiver{ring: g.ring(1 - first), sender: bell(theirs[1])}
	c.reads = newWaiter(mine[0], func() bool { return c.in.ask() || c.over.Load() })
	c.sends = newWaiter(mine[1], func() bool { return c.out.ask() || c.over.Load() })
	mine[0], mine[1] = -1, -1 // the waiters own them
	c.users.Store(2)
	go c.watch()
}

// Lends implements transport.Lender.
func (c *conn) Lends() transport.Arena {
	if c.lends == nil {
		return nil
	}
	return c.lends
}

// Borrow implements transport.Lender.
func (c *conn) Borrow(offset, length uint64) ([]byte, error) {
	if c.borrowed == nil {
		return nil, errors.New("the peer lends no memory")
	}
	return c.borrowed.take(offset, length)
}

// Return implements transport.Lender.
func (c *conn) Return() { c.borrowed.leave() }

// watch waits for the end of the socket, which is that of the peer or of this end. Then nobody waits any more.
func (c *conn) watch() {
	defer c.leave()
	_, _ = c.socket.Read(make([]byte, 1)) // a peer that writes is out of step, which is as much an end
	c.over.Store(true)
	c.reads.ring()
	c.sends.ring()
}

// Read implements net.Conn. It returns what is there, and waits where that is nothing. io.EOF is the end of the peer.
func (c *conn) Read(b []byte) (int, error) {
	if !c.enter() {
		return 0, net.ErrClosed
	}
	defer c.leave()
	for c.in.need(b); ; {
		over := c.over.Load() // first: what the peer had published before its end is read
		n, err := c.in.get(b)
		switch {
		case c.ended.Load():
			return 0, net.ErrClosed
		case n > 0 || err != nil || len(b) == 0:
			return n, err
		case over:
			return 0, io.EOF
		}
		if err := c.reads.wait(); err != nil {
			return 0, err
		}
	}
}

// TryWrite implements stream.TryWriter.
func (c *conn) TryWrite(buffers net.Buffers) (int, error) {
	if !c.enter() {
		return 0, net.ErrClosed
	}
	defer c.leave()
	switch {
	case c.ended.Load():
		return 0, net.ErrClosed
	case c.over.Load():
		return 0, syscall.EPIPE
	}
	return c.out.put(buffers)
}

// WriteBuffers implements stream.BuffersWriter.
func (c *conn) WriteBuffers(buffers *net.Buffers) error {
	for {
		n, err := c.TryWrite(*buffers)
		*buffers = stream.Consume(*buffers, n)
		if err != nil || len(*buffers) == 0 {
			return err
		}
		if err := c.waitForRoom(); err != nil {
			return err
		}
	}
}

// waitForRoom waits until the peer has read half of the ring, or something at the next of the sweeps that the patience has. Time in which
// this process was stopped counts as one, however long: the peer was perhaps stopped with it, and has to run before it can read.
func (c *conn) waitForRoom() (err error) {
	if !c.enter() {
		return net.ErrClosed
	}
	defer c.leave()
	for range transport.SweepsPerTimeout {
		if err = c.sends.file.SetReadDeadline(time.Now().Add(c.patience / transport.SweepsPerTimeout)); err != nil {
			return err
		}
		if err = c.sends.wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if room, bad := c.out.room(); room > 0 || bad != nil {
			return bad
		}
	}
	return err
}

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) {
	if err := c.WriteBuffers(&net.Buffers{b}); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Close implements net.Conn. The memory is unmapped when nobody is in it any more.
func (c *conn) Close() error {
	if c.ended.Swap(true) {
		return nil
	}
	defer c.leave()
	return c.socket.Close() // which watch notices
}

// enter keeps the memory until leave, and reports whether there is any.
func (c *conn) enter() bool {
	for {
		n := c.users.Load()
		if n == 0 {
			return false
		}
		if c.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (c *conn) leave() {
	if c.users.Add(-1) > 0 {
		return
	}
	c.reads.file.Close()
	c.sends.file.Close()
	c.shared.close()
	c.borrowed.leave()
}
