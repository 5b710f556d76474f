package stream

import (
	"net"
	"sync/atomic"
)

// turn is the right to send on a connection. It passes from sender to sender, and stays with a sender that
// was left with a rest (Conn.TrySend) until that rest is sent. The end of the connection releases waiting
// senders. Channels, not a mutex: testing/synctest counts the wait as idle.
type turn struct {
	free chan struct{}        // holds one value while the turn is free
	over chan struct{}        // closed when the connection has ended
	rest atomic.Pointer[byte] // first byte of the rest whose sender keeps the turn
}

func newTurn() *turn {
	t := &turn{free: make(chan struct{}, 1), over: make(chan struct{})}
	t.free <- struct{}{}
	return t
}

// wait gets the turn to send what begins at first, and reports whether that is the rest that the turn was kept for. ok is
// false when the connection has ended.
func (t *turn) wait(first *byte) (resumes, ok bool) {
	if resumes, ok = t.try(first); ok {
		return resumes, true
	}
	select {
	case <-t.free:
		return false, true
	case <-t.over:
		return false, false
	}
}

// try is take that does not wait: ok is false while another has the turn.
func (t *turn) try(first *byte) (resumes, ok bool) {
	if t.rest.CompareAndSwap(first, nil) {
		return true, true
	}
	select {
	case <-t.free:
		return false, true
	default:
		return false, false
	}
}

// give frees the turn.
func (t *turn) give() { t.free <- struct{}{} }

// keep reserves the turn for the rest that begins at first.
func (t *turn) keep(first *byte) { t.rest.Store(first) }

// skipEmpty drops empty buffers at the front.
func skipEmpty(b net.Buffers) net.Buffers {
	for len(b) > 0 && len(b[0]) == 0 {
		b = b[1:]
	}
	return b
}

// Consume drops the first n bytes, and empty buffers behind them.
func Consume(b net.Buffers, n int) net.Buffers {
	for len(b) > 0 && n >= len(b[0]) {
		n -= len(b[0])
		b[0] = nil
		b = b[1:]
	}
	if n > 0 {
		b[0] = b[0][n:]
	}
	return b
}
