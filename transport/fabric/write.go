//go:build cgo

package fabric

import (
	"errors"
	"net"
	"os"
	"syscall"
	"time"
)

// Write implements net.Conn.
func (c *conn) Write(b []byte) (int, error) {
	buffers := net.Buffers{b}
	if err := c.WriteBuffers(&buffers); err != nil {
		return 0, err
	}
	return len(b), nil
}

// WriteBuffers implements stream.BuffersWriter. It returns when the peer has read what is not copied.
func (c *conn) WriteBuffers(buffers *net.Buffers) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := *buffers
	*buffers = nil
	return c.lending(func() error {
		for at := (place{}); at.buffer < len(all); {
			if err := c.room(); err != nil {
				return err
			}
			if b := all[at.buffer]; len(b) > copyMax {
				if err := c.lend(b, func([]byte) int { return offerSize }, kindOffer); err != nil {
					return err
				}
				at.buffer++
				continue
			}
			var err error
			if at, _, err = c.put(all, at); errors.Is(err, errAgain) {
				err = c.pause()
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// TryWrite implements stream.TryWriter. It takes what is copied and has room.
func (c *conn) TryWrite(buffers net.Buffers) (total int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.writeEnd(); err != nil {
		return 0, err
	}
	for at := (place{}); at.buffer < len(buffers) && len(buffers[at.buffer]) <= copyMax && c.credit > 0 && len(c.free) > 0; {
		var n int
		at, n, err = c.put(buffers, at)
		total += n
		if err != nil {
			break
		}
	}
	if errors.Is(err, errAgain) {
		err = nil
	}
	return total, err
}

// place is a byte of buffers.
type place struct{ buffer, at int }

// put sends one message of as many bytes as it has room for, up to a buffer that is not copied. There is a slot and credit.
func (c *conn) put(buffers net.Buffers, from place) (to place, n int, err error) {
	s := c.free[len(c.free)-1]
	to = from
	for to.buffer < len(buffers) && n < slotBytes-headSize {
		b := buffers[to.buffer]
		if len(b) > copyMax {
			break
		}
		copied := copy(s.memory[headSize+n:], b[to.at:])
		n += copied
		if to.at += copied; to.at == len(b) {
			to = place{buffer: to.buffer + 1}
		}
	}
	if n == 0 {
		return to, 0, nil
	}
	head(s.memory, c.theirs, kindData, uint64(n))
	if err := c.post(s, headSize+n); err != nil {
		return from, 0, err
	}
	return to, n, nil
}

// post sends a message that costs credit. Its slot is the last free one.
func (c *conn) post(s *slot, length int) error {
	err := c.device.send(s, length, c.peer)
	if errors.Is(err, errAgain) {
		c.retrySoon()
		return err
	}
	if err != nil {
		c.fail(err)
		return err
	}
	c.free = c.free[:len(c.free)-1]
	c.credit--
	c.sent++
	return nil
}

// lending calls f, which may lend memory to the peer, and returns when none is lent any more.
func (c *conn) lending(f func() error) error {
	err := f()
	for len(c.sources) > 0 {
		if err == nil {
			err = c.writeEnd()
		}
		if err != nil && !c.closed { // the peer must not read any more; Close sees to it itself
			c.fail(err)
			break
		}
		if late := c.pause(); err == nil {
			err = late
		}
	}
	c.pins.Unpin()
	if err == nil {
		err = c.writeEnd() // the endpoint may have gone down before the peer had read
	}
	return err
}

// lend has the peer read a buffer. There is a slot and credit. fill completes the message and returns its length.
func (c *conn) lend(b []byte, fill func(slot []byte) int, k kind) error {
	c.pins.Pin(&b[0])
	x, own, err := c.expose(b)
	if err != nil {
		c.fail(err)
		return err
	}
	for {
		s := c.free[len(c.free)-1]
		head(s.memory, c.theirs, k, 0)
		putSource(s.memory, source{x.address, x.key, uint64(len(b))})
		if err = c.post(s, fill(s.memory)); err == nil {
			c.sources = append(c.sources, lent{x, c.sent - 1, own})
			return nil
		}
		if errors.Is(err, errAgain) {
			err = c.pause()
		}
		if err == nil {
			err = c.room()
		}
		if err != nil {
			if own {
				x.hide()
			}
			return err
		}
	}
}

// room waits for a slot and credit.
func (c *conn) room() error {
	for c.credit == 0 || len(c.free) == 0 {
		if err := c.writeEnd(); err != nil {
			return err
		}
		if err := c.pause(); err != nil {
			return err
		}
	}
	return c.writeEnd()
}

// writeEnd is why nothing can be sent any more, or nil.
func (c *conn) writeEnd() error {
	if err := c.ended(); err != nil || !c.fin {
		return err
	}
	return &net.OpError{Op: "write", Net: Kind, Addr: c.RemoteAddr(), Err: syscall.EPIPE}
}

// pause waits until something has changed for a sender, for as long as a peer may take nothing.
func (c *conn) pause() error {
	until := time.Now().Add(c.patience)
	c.stirred = false
	c.timer.Reset(c.patience)
	c.writable.Wait()
	c.timer.Stop()
	if !c.stirred && !time.Now().Before(until) {
		return &net.OpError{Op: "write", Net: Kind, Addr: c.RemoteAddr(), Err: os.ErrDeadlineExceeded}
	}
	return nil
}

// endLoans ends the loan of the first n sources.
func (c *conn) endLoans(n int) {
	for _, s := range c.sources[:n] {
		if s.own {
			s.hide()
		}
	}
	c.sources = c.sources[:copy(c.sources, c.sources[n:])]
}
