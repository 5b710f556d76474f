package transporttest

import (
	"context"
	"net"
	"os"
	"time"
)

// conn is one end of a connection, a net.Conn over two lanes. As with a socket one goroutine may read
// while another writes.
type conn struct {
	network       *Network
	node          string // whose end it is
	local, remote addr
	end           *end   // behind the network's lock
	lends         *arena // of this end's node, which the peer uses
	borrows       *arena // of the peer's
}

func (c *conn) Read(b []byte) (int, error) {
	return c.loop(c.end.in.readable, len(b) == 0, func() (int, bool, time.Duration, error) {
		n, wait, err := c.end.in.receive(c.end, b)
		return n, n > 0, wait, err
	})
}

func (c *conn) Write(b []byte) (int, error) { return c.send(b, nil) }

// send sends b as a piece of the stream, or of the write w.
func (c *conn) send(b []byte, w *write) (int, error) {
	return c.loop(c.end.out.writable, len(b) == 0, func() (int, bool, time.Duration, error) {
		n, wait, err := c.end.out.put(c.end, b, w)
		b = b[n:]
		return n, len(b) == 0, wait, err
	})
}

// TryWrite implements stream.TryWriter.
func (c *conn) TryWrite(buffers net.Buffers) (int, error) {
	_ = c.network.running(context.Background(), c.node)
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	if c.end.closed {
		return 0, net.ErrClosed
	}
	total := 0
	for _, b := range buffers {
		n, _, err := c.end.out.put(c.end, b, nil)
		total += n
		if n < len(b) || err != nil {
			return total, err
		}
	}
	return total, nil
}

// loop calls step, with the network locked, until it is done or fails; in between it waits for a
// change, for as long as step says, and until the deadline.
func (c *conn) loop(change chan struct{}, done bool, step func() (n int, done bool, wait time.Duration, err error)) (total int, err error) {
	for !done && err == nil {
		var n int
		var wait time.Duration
		_ = c.network.running(context.Background(), c.node)
		c.network.mu.Lock()
		deadline := c.end.deadline
		if c.end.closed {
			err = net.ErrClosed
		} else {
			n, done, wait, err = step()
		}
		c.network.mu.Unlock()
		total += n
		if !done && err == nil {
			err = await(change, wait, deadline)
		}
	}
	return total, err
}

// await returns on a change or after wait (0: no limit), and fails at the deadline.
func await(change chan struct{}, wait time.Duration, deadline time.Time) error {
	var due bool
	if !deadline.IsZero() {
		left := time.Until(deadline)
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		if wait <= 0 || left < wait {
			wait, due = left, true
		}
	}
	var expired <-chan time.Time
	if wait > 0 {
		timer := time.NewTimer(wait)
		defer timer.Stop()
		expired = timer.C
	}
	select {
	case <-change:
	case <-expired:
		if due {
			return os.ErrDeadlineExceeded
		}
	}
	return nil
}

// Close ends the stream behind what was written.
func (c *conn) Close() error {
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	return c.end.close()
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline holds for reads and writes that begin later.
func (c *conn) SetDeadline(t time.Time) error {
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	c.end.deadline = t
	return nil
}

func (c *conn) SetReadDeadline(t time.Time) error  { return c.SetDeadline(t) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.SetDeadline(t) }
