//go:build cgo

package fabric

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/unique"
	"github.com/paceline/paceline/transport/auth"
)

const (
	// slotBytes is the size of a message's memory. Providers copy messages of up to 16 KiB, and ask the peer first for
	// longer ones.
	slotBytes = 8 << 10
	// credits is how many messages may lie at a reader that does not read. As many returns may be under way beside them,
	// because each returns at least one.
	credits = 16
	slots   = 4*credits + 2 // to receive into, to send messages and returns from, for reads of Read and for writes of the peer
	// copyMax is the largest buffer that is copied into messages. Larger ones are read from where they lie.
	copyMax = 32 << 10
	// pieceBytes is how much one read of the peer's memory has at most. A region that is released waits for one.
	pieceBytes = 1 << 20
	// lingering is how long the end of a connection waits for the peer to have what was sent before, and a device without connections
	// answers the peers of the last ones.
	lingering = 250 * time.Millisecond
)

// What the side connection carries behind the names: ready, once and from the dialer; fin and the number of messages that are valid, and the peer's ack that it has these.
const (
	sideReady = 'R'
	sideFin   = 'F'
	sideAck   = 'A'
)

// conn is a byte stream between the endpoints of two processes, beside a TCP connection that ends with the process that has it. One goroutine
// reads and one writes, as package stream has it.
type conn struct {
	net.Conn // the side connection
	device   *device
	all      bool          // the payloads of tensors have tags
	patience time.Duration // for a peer that takes nothing

	key       uint64        // of messages to this end
	gone      chan struct{} // closed when Close has done its work
	delivered chan struct{} // closed when the peer has all messages, or never will
	once      sync.Once     // closes delivered

	mu       lockorder.Mutex
	peer     uint64     // the number of its endpoint
	theirs   uint64     // the key of messages to it
	readable *sync.Cond // something has changed for who reads
	writable *sync.Cond // something has changed for who writes
	changed  *sync.Cond // a read of the peer's memory has ended
	closed   bool       // on this side
	cause    error      // why it ended
	met      bool       // a message of the peer's endpoint has come
	ready    bool       // both ends have one
	fin      bool       // the peer has closed the connection
	valid    uint64     // messages that it had sent before
	over     bool       // nothing is sent or read any more
	left     bool       // the device knows it no longer
	retrying bool

	// Sending.
	credit  int            // messages that the peer has room for
	free    []*slot        // for messages
	returns []*slot        // for returns
	sent    uint64         // messages
	sources []lent         // what the peer still reads, in order
	stirred bool           // something has changed for a sender since it began to wait
	timer   *time.Timer    // wakes a sender that has waited for the peer's patience
	pins    runtime.Pinner // of sources

	// Receiving.
	queue    []message // that Read has not used up
	received uint64    // messages
	owed     int       // messages used up that were not returned yet
	took     int       // sources read, likewise
	reads    *slot     // for reads of Read
	reading  bool      // one is under way
	readErr  error
	readPins runtime.Pinner

	grants map[uint64]grant // by the token's key
	writes []message        // of the peer into memory of this end
	pulls  *slot            // for reads of the first of them
	pull   pull             // the one that is under way
}

// lent is memory that the peer reads.
type lent struct {
	exposed
	index uint64 // of the message that says so
	own   bool   // it was registered for this message alone
}

func newConn(side net.Conn, d *device, patience time.Duration) *conn {
	c := &conn{
		Conn: side, device: d, patience: patience,
		key: unique.Number(), gone: make(chan struct{}), delivered: make(chan struct{}),
		credit: credits,
		queue:  make([]message, 0, 2*credits), sources: make([]lent, 0, credits), grants: map[uint64]grant{},
	}
	c.mu.Place(levelConn, "fabric.conn.mu")
	c.readable, c.writable, c.changed = sync.NewCond(&c.mu), sync.NewCond(&c.mu), sync.NewCond(&c.mu)
	c.timer = time.AfterFunc(time.Hour, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.writable.Broadcast()
	})
	c.timer.Stop()
	return c
}

// stir has who writes look again.
func (c *conn) stir() {
	c.stirred = true
	c.writable.Broadcast()
}

// wake has everybody who waits look again.
func (c *conn) wake() {
	c.stir()
	c.readable.Broadcast()
	c.changed.Broadcast()
}

// busyPause is when something is tried again for which the provider had no room.
const busyPause = 100 * time.Microsecond

// retrySoon repeats what the provider is too busy for. It may not say when it no longer is.
func (c *conn) retrySoon() {
	if c.retrying {
		return
	}
	c.retrying = true
	time.AfterFunc(busyPause, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.retrying = false
		c.settle()
		c.startPull()
		c.wake()
	})
}

// completed handles the end of an operation.
func (c *conn) completed(s *slot, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case s == c.reads:
		c.readEnded(err)
	case s == c.pulls:
		c.pulled(err)
	case c.left:
		c.device.giveBack(s)
	case s.returns:
		c.returns = append(c.returns, s)
		c.settle()
	default:
		c.free = append(c.free, s)
	}
	if err != nil {
		c.fail(err)
	}
	c.stir()
}

// watch reads the side connection until it ends.
func (c *conn) watch() {
	for {
		var said [9]byte
		_, err := io.ReadFull(c.Conn, said[:1])
		if err == nil && said[0] == sideFin {
			_, err = io.ReadFull(c.Conn, said[1:])
		}
		c.mu.Lock()
		switch {
		case err != nil:
			switch {
			case c.fin || c.closed:
			case !c.ready:
				c.fail(fmt.Errorf("%w: the fabric has not carried messages both ways: %w", auth.ErrInterrupted, err))
			default:
				c.fail(&net.OpError{Op: "read", Net: Kind, Addr: c.RemoteAddr(), Err: syscall.ECONNRESET})
			}
			c.settled()
			c.mu.Unlock()
			return
		case said[0] == sideReady:
			c.ready = true
			c.stir()
		case said[0] == sideFin && !c.fin:
			c.finish(binary.LittleEndian.Uint64(said[1:]))
		case said[0] == sideAck:
			c.settled()
		}
		c.mu.Unlock()
	}
}

// settled ends the wait of Close.
func (c *conn) settled() { c.once.Do(func() { close(c.delivered) }) }

// finish handles the peer's close: of its messages so many are valid, and nobody waits at its end for the others to be read.
func (c *conn) finish(valid uint64) {
	c.fin, c.valid = true, valid
	for n := len(c.queue); n > 0 && c.queue[n-1].index >= valid; n-- {
		_ = c.device.recycle(c.queue[n-1].slot)
		c.queue = c.queue[:n-1]
	}
	if c.reading || len(c.writes) > 0 {
		c.cause = cmp.Or(c.cause, io.EOF)
	}
	if c.received < valid { // the others are on their way
		time.AfterFunc(c.patience, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			if c.received < valid {
				c.fail(&net.OpError{Op: "read", Net: Kind, Addr: c.RemoteAddr(), Err: syscall.ECONNRESET})
			}
		})
	}
	c.finished()
	c.wake()
}

// finished ends the traffic when all messages of a peer that has closed the connection are here, and nothing of its memory is being read.
func (c *conn) finished() {
	if !c.fin {
		return
	}
	if (c.received >= c.valid || c.cause != nil) && !c.reading && c.pull.region == nil && !c.over {
		_, _ = c.Conn.Write([]byte{sideAck}) // a peer that does not hear it waits a little longer
		c.end()
	}
	c.settled()
}

// fail ends the connection, unless it has ended, for a reason. What breaks because the endpoint was closed, for example by
// a peer in this process that has heard of it first, has that reason.
func (c *conn) fail(reason error) {
	if c.cause == nil && !c.closed {
		if c.device.isDown() {
			reason = errDown
		}
		c.cause = reason
		c.Conn.Close() // without a fin: the peer learns that it failed
	}
	c.end()
}

// end ends the traffic. A read of the peer's memory that is under way ends by itself, because the peer answers, or its connection breaks;
// where it does not, for example because the peer is stopped, the device goes down.
func (c *conn) end() {
	if c.over {
		return
	}
	c.over = true
	c.endLoans(len(c.sources))
	if c.reading || c.pull.region != nil {
		time.AfterFunc(c.patience, func() {
			c.mu.Lock()
			held := c.reading || c.pull.region != nil
			c.mu.Unlock()
			if held {
				c.device.down()
			}
		})
	}
	c.wake()
}

// leave has the device forget the connection.
func (c *conn) leave() {
	idle := slices.Concat(c.free, c.returns)
	if !c.reading && c.pull.region == nil {
		idle = append(idle, c.reads, c.pulls)
	}
	for _, m := range slices.Concat(c.queue, c.writes) {
		_ = c.device.recycle(m.slot)
	}
	c.left, c.free, c.returns, c.queue, c.writes = true, nil, nil, nil, nil
	c.device.leave(c, idle)
}

// Close implements net.Conn. When it returns nothing touches memory any more. What was sent before arrives.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		<-c.gone
		return nil
	}
	c.closed = true
	orderly := !c.fin && !c.over
	fin := binary.LittleEndian.AppendUint64([]byte{sideFin}, c.sent)
	if len(c.sources) > 0 {
		binary.LittleEndian.PutUint64(fin[1:], c.sources[0].index)
	}
	c.wake()
	c.mu.Unlock()
	if orderly {
		c.sayFin(fin)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end()
	for c.reading || c.pull.region != nil {
		c.changed.Wait()
	}
	c.Conn.Close()
	c.leave()
	c.timer.Stop()
	close(c.gone)
	return nil
}

// sayFin tells the peer which messages are valid, and waits until it has them.
func (c *conn) sayFin(fin []byte) {
	_ = c.SetWriteDeadline(time.Now().Add(lingering))
	if _, err := c.Conn.Write(fin); err != nil {
		return
	}
	timer := time.NewTimer(lingering)
	defer timer.Stop()
	select {
	case <-c.delivered:
	case <-timer.C:
	}
}
