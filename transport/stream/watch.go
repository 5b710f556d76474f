package stream

import (
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Sweeps of a watch, of transport.SweepsPerTimeout. A peer sends at least once in three of its sweeps, and may be stopped in between: after sweepsOfSilence it is one that no longer runs.
// One sweep passes before the count begins, and one may pass while a peer that goes on is read. What is left of the timeout after the silence is for what
// follows: whoever decides hears of it from several sides, and the others go on.
const (
	sweepsPerBeat   = 2
	sweepsOfSilence = 21
)

// Tolerance is for how long a peer may be stopped that is not given up.
func Tolerance(peerTimeout time.Duration) time.Duration {
	return peerTimeout * (sweepsOfSilence - sweepsPerBeat - 2) / transport.SweepsPerTimeout
}

// Silence is the time after which a peer that has fallen silent is given up on all its connections.
func Silence(peerTimeout time.Duration) time.Duration {
	return peerTimeout * (sweepsOfSilence + 1) / transport.SweepsPerTimeout
}

// watch notices peers that no longer run, though their host acknowledges what is sent to them: their process is stopped
// (SIGSTOP, a debugger), or hangs. It shows the peers of its own connections that this process runs. One watch serves
// all connections of a transport, with one goroutine while there are any.
//
//  1. A connection that has sent nothing for sweepsPerBeat sends a beat, which the other end's reader passes over.
//  2. A connection whose reader waits, and has waited without a byte for sweepsOfSilence, ends. A reader that is busy
//     with what it has read, however long, does not wait.
//
// Silence is counted in sweeps of this process, not by a clock. Time in which this process was stopped itself, or did not
// get a processor, does not count: after it the peers' beats are read before the next sweep. Where that was longer than
// peers bear, connections that have ended say so (transport.ErrStopped).
type watch struct {
	timeout time.Duration // in which a peer that has fallen silent is given up, and the others go on

	mu      sync.Mutex // the connections' turns are not taken under it
	conns   map[*Conn]struct{}
	stop    chan struct{} // ends the goroutine; nil while there is no connection
	swept   time.Time     // begin of the last sweep
	resumed time.Time     // begin of the last one that came later than peers bear
	missed  time.Duration // by how much
}

// pulse is what a watch knows of a connection.
type pulse struct {
	reads atomic.Uint32 // odd while the reader waits for bytes
	sends atomic.Uint32 // sends that have begun

	// Of the last sweep; the watch's goroutine's alone.
	lastReads, lastSends uint32
	idle                 int         // sweeps without a send
	silent               int         // sweeps in which the reader has waited without a byte
	frame                []byte      // a beat
	beats                net.Buffers // for the frame: what is sent is taken out
}

func newWatch(timeout time.Duration) *watch {
	return &watch{timeout: timeout, conns: make(map[*Conn]struct{})}
}

// add begins to watch a connection, until it ends.
func (w *watch) add(c *Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns[c] = struct{}{}
	if w.stop == nil {
		w.stop, w.swept = make(chan struct{}), time.Now()
		go w.run(w.stop)
	}
}

// remove forgets a connection, which may not be watched.
func (w *watch) remove(c *Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, c)
	if w.stop != nil && len(w.conns) == 0 {
		close(w.stop)
		w.stop = nil
	}
}

func (w *watch) run(stop <-chan struct{}) {
	var all []*Conn
	ticks.Until(stop, max(w.timeout/transport.SweepsPerTimeout, time.Millisecond), func(time.Time) {
		all = w.begin(stop, all[:0])
		for _, c := range all {
			w.sweep(c)
		}
		clear(all)
	})
}

// begin begins a sweep and lists the connections: none to a goroutine that another has followed.
func (w *watch) begin(stop <-chan struct{}, into []*Conn) []*Conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stop != stop {
		return into
	}
	now := time.Now()
	if late := now.Sub(w.swept); late > Tolerance(w.timeout) {
		w.resumed, w.missed = now, late
	}
	w.swept = now
	for c := range w.conns {
		into = append(into, c)
	}
	return into
}

// stopped is for how long this process has not run, until now or shortly before; 0 if that is within what peers bear.
func (w *watch) stopped() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	switch late := now.Sub(w.swept); {
	case w.stop != nil && late > Tolerance(w.timeout):
		return late
	case now.Sub(w.resumed) < w.timeout:
		return w.missed
	}
	return 0
}

// sweep looks at one connection.
func (w *watch) sweep(c *Conn) {
	p := &c.pulse
	if sends := p.sends.Load(); sends != p.lastSends {
		p.idle = 0
	} else if p.idle++; p.idle == sweepsPerBeat {
		c.beat()
		p.idle = 0
	}
	p.lastSends = p.sends.Load()
	reads := p.reads.Load()
	if reads != p.lastReads || reads%2 == 0 {
		p.lastReads, p.silent = reads, 0
		return
	}
	if p.silent++; p.silent >= sweepsOfSilence {
		w.remove(c)
		// A carrier waits as it closes for what such a peer does not do. The other connections' beats do not wait for that.
		go c.end(fmt.Errorf("%s has been silent for %v: its process is stopped, or its host or the network to it is down: %w", c.peer, w.timeout*sweepsOfSilence/transport.SweepsPerTimeout, os.ErrDeadlineExceeded))
	}
}

// beat shows the peer that this process runs, unless another sender does so.
func (c *Conn) beat() {
	p := &c.pulse
	if p.frame == nil {
		h := wire.Header{Type: wire.TypeBeat}
		p.frame, p.beats = h.Append(nil), make(net.Buffers, 1)
	}
	p.beats[0] = p.frame
	rest, busy, err := c.TrySend(p.beats)
	if err == nil && !busy && len(rest) > 0 { // a stream that cannot write without waiting, or a peer that does not read
		p.frame, p.beats = nil, nil // that sender's now, and its address means the rest
		go func() { _ = c.Send(rest) }()
	}
}

// waited is a stream that says when its reader waits.
type waited struct {
	net.Conn
	pulse *pulse
}

func (r waited) Read(b []byte) (int, error) {
	r.pulse.reads.Add(1)
	defer r.pulse.reads.Add(1)
	return r.Conn.Read(b)
}
