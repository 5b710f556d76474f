package transporttest

import (
	"io"
	"slices"
	"syscall"
	"time"
)

// link is one direction between two nodes, shared by all their connections.
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

// chunk is a piece of a stream in flight, or its end, or a piece of a one-sided write.
type chunk struct {
	data   []byte
	write  *write    // where the data belong; nil for a piece of the stream
	at     time.Time // when it can be read
	frozen bool      // on a frozen link, or of a stopped node: at is not known yet
	fin    bool      // behind this the sender sends no more
}

// maxChunk is how much of a write travels as one piece, in bytes: what a reader waits for at a time.
const maxChunk = 16 << 10

// lane is one direction of a connection. It holds at most Options.Buffer bytes.
type lane struct {
	traffic  *traffic
	path     path
	link     *link
	back     *lane // the other direction
	chunks   []chunk
	held     int
	torn     bool          // what arrived last is a write that is not complete
	gone     time.Time     // when the sender learns that the reader has closed; zero while it is open
	err      error         // ends both sides at once
	readable chan struct{} // holds one value when there may be something new for the reader
	writable chan struct{} // the same for the sender
}

func (t *traffic) lane(p path) *lane {
	return &lane{traffic: t, path: p, link: t.link(p), readable: make(chan struct{}, 1), writable: make(chan struct{}, 1)}
}

// put accepts as much of b as there is room for, as a piece of the stream or of the write w. wait is 0, or how
// long it takes until something changes by itself.
func (l *lane) put(e *end, b []byte, w *write) (n int, wait time.Duration, err error) {
	for n < len(b) {
		if !l.gone.IsZero() {
			if wait = time.Until(l.gone); wait <= 0 {
				return n, 0, syscall.EPIPE
			}
		}
		if l.err != nil {
			return n, 0, l.err
		}
		part := l.link.beforeFault(min(len(b)-n, l.traffic.Buffer-l.held, maxChunk), w != nil)
		if part > 0 {
			l.queue(chunk{data: slices.Clone(b[n : n+part]), write: w.next(part)})
			l.link.passed(part, w != nil)
			n += part
		}
		if !l.traffic.strike(e, l.link, w != nil) && part <= 0 {
			return n, wait, nil
		}
	}
	return n, wait, nil
}

// queue puts a chunk on the link.
func (l *lane) queue(c chunk) {
	l.held += len(c.data)
	if c.frozen = l.isFrozen(); !c.frozen {
		l.leave(&c)
	}
	l.chunks = append(l.chunks, c)
	signal(l.readable)
}

// isFrozen reports whether nothing arrives at present: the link is frozen, or the sender is stopped.
func (l *lane) isFrozen() bool { return l.link.thawed != nil || l.traffic.stopped[l.path.from] != nil }

// leave sets when a chunk arrives. At the end of one direction the receiver also learns that the peer no longer reads
// the other.
func (l *lane) leave(c *chunk) {
	c.frozen, c.at = false, l.link.arrival(len(c.data))
	if c.fin && l.back.gone.IsZero() {
		l.back.gone = c.at
		signal(l.back.writable)
	}
}

// receive moves the part of the stream that has arrived to b, and one-sided writes to their memory. wait is 0, or how long it takes until more arrives.
func (l *lane) receive(e *end, b []byte) (n int, wait time.Duration, err error) {
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
			if err := e.place(piece); err != nil {
				e.fail(err)
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
	if l.isFrozen() {
		return
	}
	for i := range l.chunks {
		if c := &l.chunks[i]; c.frozen {
			l.leave(c)
		}
	}
	signal(l.readable)
}

// fail ends the lane at once; what is in flight is lost.
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
