//go:build cgo

package fabric

import (
	"errors"
	"fmt"
	"io"
	"net"
)

// Read implements net.Conn. Bytes that the peer offers in its memory are read from there into b.
func (c *conn) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.queue) == 0 || c.closed {
		if err := c.readEnd(); err != nil {
			return 0, err
		}
		c.readable.Wait()
	}
	m := &c.queue[0]
	if m.kind == kindOffer {
		return c.readOffer(b)
	}
	n := copy(b, m.slot.memory[m.from:m.to])
	if m.from += n; m.from == m.to {
		c.used(0)
	}
	return n, nil
}

// readEnd is why nothing follows in the stream, or nil.
func (c *conn) readEnd() error {
	if err := c.ended(); err != nil || !c.fin || c.received < c.valid {
		return err
	}
	return io.EOF
}

// ended is why the connection carries nothing any more, or nil.
func (c *conn) ended() error {
	if c.closed {
		return net.ErrClosed
	}
	return c.cause
}

// readOffer reads the next bytes of the stream from the peer's memory.
func (c *conn) readOffer(b []byte) (int, error) {
	m := c.queue[0]
	b = b[:min(uint64(len(b)), m.length, pieceBytes)]
	c.readPins.Pin(&b[0])
	defer c.readPins.Unpin()
	into, own, err := c.into(b)
	if err != nil {
		c.fail(err)
		return 0, err
	}
	if own {
		defer into.hide()
	}
	for err = errAgain; errors.Is(err, errAgain) && !c.over; {
		if err = c.device.read(c.reads, b, into, c.peer, m.address, m.key); errors.Is(err, errAgain) {
			c.retrySoon()
			c.readable.Wait()
		}
	}
	if err == nil {
		for c.reading = true; c.reading; {
			c.readable.Wait()
		}
		err = c.readErr
	}
	over := c.ended()
	switch {
	case over != nil:
		return 0, over
	case err != nil:
		c.fail(err)
		return 0, err
	case len(c.queue) == 0: // the peer has closed the connection and taken its memory back
		return 0, io.EOF
	}
	next := &c.queue[0]
	next.address, next.length = m.address+uint64(len(b)), m.length-uint64(len(b))
	if next.length == 0 {
		c.used(1)
	}
	return len(b), nil
}

// used gives back the first message of the queue, whose sources were read.
func (c *conn) used(sources int) {
	slot := c.queue[0].slot
	c.queue = c.queue[:copy(c.queue, c.queue[1:])]
	c.giveBack(slot, sources)
}

// giveBack has the slot of a message receive again, and owes the peer its credit.
func (c *conn) giveBack(s *slot, sources int) {
	if err := c.device.recycle(s); err != nil {
		c.fail(err)
		return
	}
	c.owed++
	c.took += sources
	c.settle()
}

// settle returns what the peer needs to know soon.
func (c *conn) settle() {
	if c.over || len(c.returns) == 0 || c.took == 0 && c.owed < credits/2 {
		return
	}
	_ = c.sendReturn()
}

// sendReturn returns what is owed, which may be nothing. There is a slot.
func (c *conn) sendReturn() error {
	s := c.returns[len(c.returns)-1]
	head(s.memory, c.theirs, kindReturn, uint64(c.owed)|uint64(c.took)<<32)
	err := c.device.send(s, headSize, c.peer)
	switch {
	case errors.Is(err, errAgain):
		c.retrySoon()
	case err != nil:
		c.fail(err)
	default:
		c.returns = c.returns[:len(c.returns)-1]
		c.owed, c.took = 0, 0
	}
	return err
}

// readEnded handles the end of a read for Read.
func (c *conn) readEnded(err error) {
	if c.reading {
		c.reading, c.readErr = false, err
		c.readable.Broadcast()
		c.changed.Broadcast()
		c.finished()
	}
}

// arrived handles a message.
func (c *conn) arrived(s *slot, length int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m, err := parse(s.memory[:length])
	switch {
	case err != nil:
		c.fail(fmt.Errorf("the peer sent %w", err))
		_ = c.device.recycle(s)
		return
	case c.over:
		_ = c.device.recycle(s)
		return
	case m.kind == kindReturn:
		if err := c.device.recycle(s); err != nil {
			c.fail(err)
		}
		c.returned(m)
		return
	}
	m.slot, m.index = s, c.received
	c.received++
	switch {
	case c.fin && m.index >= c.valid: // it was not sent whole
		_ = c.device.recycle(s)
	case len(c.queue)+len(c.writes)+c.owed >= credits: // the slots of other connections are not for it
		c.fail(fmt.Errorf("the peer sends more than the %d messages for which there is room", credits))
		_ = c.device.recycle(s)
	case m.kind == kindWrite:
		c.writes = append(c.writes, m)
		c.startPull()
	default:
		c.queue = append(c.queue, m)
		c.readable.Broadcast()
	}
	c.finished()
}

// returned handles a return. The first one that the peer sends is of nothing.
func (c *conn) returned(m message) {
	c.met = true
	c.credit += m.messages
	if m.messages > credits || c.credit > credits || m.sources > len(c.sources) {
		c.fail(fmt.Errorf("the peer returns %d messages and %d offers, more than it got", m.messages, m.sources))
		return
	}
	c.endLoans(m.sources)
	c.stir()
}
