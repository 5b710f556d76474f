package transporttest

import (
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"time"
)

// link is the way from one node to another, shared by all connections that go it.
type link struct {
	latency   time.Duration
	bandwidth int       // bytes per second; 0 is no limit
	free      time.Time // when everything sent so far has left the sender
	all       meter     // of all bytes, of all connections
	writes    meter     // of the bytes of one-sided writes among them
	thawed    chan struct{}
	// thawed is nil, or while the link is frozen a channel that is closed when it thaws. What was sent
	// before a frost arrives; what is sent during it arrives after it.
}

// arrival is when n bytes that are sent now arrive.
func (l *link) arrival(n int) time.Time {
	now := time.Now()
	if l.free.Before(now) {
		l.free = now
	}
	if l.bandwidth > 0 {
		l.free = l.free.Add(time.Duration(float64(n) / float64(l.bandwidth) * float64(time.Second)))
	}
	return l.free.Add(l.latency)
}

// chunk is a piece of a stream on its way, or its end, or a piece of a one-sided write.
type chunk struct {
	data   []byte
	write  *write    // where the data belong; nil for a piece of the stream
	at     time.Time // when it can be read
	frozen bool      // on a frozen link: at is not known yet
	fin    bool      // behind this the sender sends no more
}

// maxChunk is how much of a write travels as one piece, in bytes: what a reader waits for at a time.
const maxChunk = 16 << 10

// lane is one direction of a connection. It holds at most Options.Buffer bytes.
type lane struct {
	network  *Network
	path     path
	link     *link
	back     *lane // the other direction
	chunks   []chunk
	held     int
	torn     bool          // what arrived last is a write of which there is more
	gone     time.Time     // when the sender hears that nobody reads any more; zero if somebody does
	err      error         // ends both sides at once
	readable chan struct{} // holds one value when there may be something new for the reader
	writable chan struct{} // the same for the sender
}

func (n *Network) lane(p path) *lane {
	return &lane{network: n, path: p, link: n.link(p), readable: make(chan struct{}, 1), writable: make(chan struct{}, 1)}
}

// put takes as much of b as there is room for, as a piece of the stream or of the write w. wait is 0, or how
// long it takes until something changes by itself.
func (l *lane) put(c *conn, b []byte, w *write) (n int, wait time.Duration, err error) {
	for n < len(b) {
		if !l.gone.IsZero() {
			if wait = time.Until(l.gone); wait <= 0 {
				return n, 0, syscall.EPIPE
			}
		}
		if l.err != nil {
			return n, 0, l.err
		}
		part := l.link.beforeFault(min(len(b)-n, l.network.Buffer-l.held, maxChunk), w != nil)
		if part > 0 {
			l.queue(chunk{data: slices.Clone(b[n : n+part]), write: w.next(part)})
			l.link.passed(part, w != nil)
			n += part
		}
		if !l.network.strike(c, l.link, w != nil) && part <= 0 {
			return n, wait, nil
		}
	}
	return n, wait, nil
}

// queue sends a chunk on its way.
func (l *lane) queue(c chunk) {
	l.held += len(c.data)
	if c.frozen = l.link.thawed != nil; !c.frozen {
		l.leave(&c)
	}
	l.chunks = append(l.chunks, c)
	signal(l.readable)
}

// leave fixes when a chunk arrives. With the end of one direction arrives the news that nobody reads
// the other any more.
func (l *lane) leave(c *chunk) {
	c.frozen, c.at = false, l.link.arrival(len(c.data))
	if c.fin && l.back.gone.IsZero() {
		l.back.gone = c.at
		signal(l.back.writable)
	}
}

// take moves what has arrived to b, and what was written to its place. wait is 0, or how long it takes until more arrives.
func (l *lane) take(c *conn, b []byte) (n int, wait time.Duration, err error) {
	for l.err == nil && n < len(b) && len(l.chunks) > 0 {
		piece := &l.chunks[0]
		if piece.frozen {
			break
		}
		if wait = time.Until(piece.at); wait > 0 {
			break
		}
		switch {
		case piece.fin && n > 0:
			return n, 0, nil
		case piece.fin && l.torn:
			return 0, 0, io.ErrUnexpectedEOF
		case piece.fin:
			return 0, 0, io.EOF
		case piece.write != nil:
			if err := c.place(piece); err != nil {
				c.fail(err)
				return n, 0, err
			}
			l.held -= len(piece.data)
			l.chunks = l.chunks[1:]
			signal(l.writable)
			continue
		}
		moved := copy(b[n:], piece.data)
		piece.data = piece.data[moved:]
		n += moved
		l.held -= moved
		if len(piece.data) == 0 {
			l.chunks = l.chunks[1:]
		}
	}
	if n > 0 {
		signal(l.writable)
		return n, 0, nil
	}
	return 0, wait, l.err
}

// thaw sends what had to wait for the end of the frost.
func (l *lane) thaw() {
	for i := range l.chunks {
		if c := &l.chunks[i]; c.frozen {
			l.leave(c)
		}
	}
	signal(l.readable)
}

// fail ends the lane at once; what is on its way is lost.
func (l *lane) fail(err error) {
	if l.err == nil {
		l.err, l.chunks, l.held = err, nil, 0
	}
	signal(l.readable)
	signal(l.writable)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// conn is one end of a connection, a net.Conn over two lanes. As with a socket one goroutine may read
// while another writes.
type conn struct {
	network       *Network
	number        int
	local, remote addr
	in, out       *lane
	peer          *conn // the other end
	closed        bool
	deadline      time.Time
	grants        map[uint64]grant // to the peer, by their keys
}

// join makes a connection and returns its two ends. The network is locked.
func (n *Network) join(p path, from, to addr) (near, far *conn) {
	out, back := n.lane(p), n.lane(p.back())
	out.back, back.back = back, out
	near = &conn{network: n, number: n.lastPort, local: from, remote: to, in: back, out: out}
	far = &conn{network: n, number: n.lastPort, local: to, remote: from, in: out, out: back}
	near.peer, far.peer = far, near
	n.conns[near] = struct{}{}
	return near, far
}

func (c *conn) Read(b []byte) (int, error) {
	return c.loop(c.in.readable, len(b) == 0, func() (int, bool, time.Duration, error) {
		n, wait, err := c.in.take(c, b)
		return n, n > 0, wait, err
	})
}

func (c *conn) Write(b []byte) (int, error) { return c.send(b, nil) }

// send sends b as a piece of the stream, or of the write w.
func (c *conn) send(b []byte, w *write) (int, error) {
	return c.loop(c.out.writable, len(b) == 0, func() (int, bool, time.Duration, error) {
		n, wait, err := c.out.put(c, b, w)
		b = b[n:]
		return n, len(b) == 0, wait, err
	})
}

// TryWrite implements stream.TryWriter.
func (c *conn) TryWrite(buffers net.Buffers) (int, error) {
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	if c.closed {
		return 0, net.ErrClosed
	}
	total := 0
	for _, b := range buffers {
		n, _, err := c.out.put(c, b, nil)
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
		c.network.mu.Lock()
		deadline := c.deadline
		if c.closed {
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
	if c.closed {
		return net.ErrClosed
	}
	c.closed = true
	c.out.queue(chunk{fin: true})
	c.in.chunks = nil // what was not read is lost, and makes no room
	signal(c.in.readable)
	signal(c.out.writable)
	if c.peer.closed {
		c.forget()
	}
	return nil
}

// forget takes the connection out of those that faults can strike.
func (c *conn) forget() {
	delete(c.network.conns, c)
	delete(c.network.conns, c.peer)
}

// fail ends both directions of the connection for both ends, at once.
func (c *conn) fail(err error) {
	c.in.fail(err)
	c.out.fail(err)
	c.forget()
}

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline holds for reads and writes that begin later.
func (c *conn) SetDeadline(t time.Time) error {
	c.network.mu.Lock()
	defer c.network.mu.Unlock()
	c.deadline = t
	return nil
}

func (c *conn) SetReadDeadline(t time.Time) error  { return c.SetDeadline(t) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.SetDeadline(t) }
