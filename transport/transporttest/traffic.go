package transporttest

import (
	"net"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// traffic is the state of a network, behind its lock: listeners, connections, and faults that are scheduled.
type traffic struct {
	Options
	locked    func(f func()) // runs f with the network's lock: for timers, which hold none
	links     map[path]*link
	listeners map[string]*listener
	ends      map[*end]struct{}        // one of each connection that is open
	stopped   map[string]chan struct{} // nodes, and what is closed when they continue
	timers    []*time.Timer
	lastPort  int
	regions   uint64 // that were registered
	closed    bool
}

// path names a link by its two nodes.
type path struct{ from, to string }

func (p path) back() path { return path{p.to, p.from} }

func newTraffic(o Options, locked func(f func())) *traffic {
	return &traffic{
		Options: o, locked: locked, links: make(map[path]*link), listeners: make(map[string]*listener), ends: make(map[*end]struct{}),
		stopped: make(map[string]chan struct{}),
	}
}

// close ends everything.
func (t *traffic) close() {
	t.closed = true
	for _, timer := range t.timers {
		timer.Stop()
	}
	for _, l := range t.listeners {
		t.shut(l)
	}
	for e := range t.ends {
		e.fail(net.ErrClosed)
	}
	for node := range t.stopped {
		t.goOn(node)
	}
}

// port is a port that was not used before.
func (t *traffic) port() string {
	t.lastPort++
	return strconv.Itoa(t.lastPort)
}

// listen registers a listener, unless its address is in use.
func (t *traffic) listen(l *listener) bool {
	if t.listeners[l.address.at] != nil || t.closed {
		return false
	}
	t.listeners[l.address.at] = l
	return true
}

// shut removes a listener and resets the connections that wait for Accept.
func (t *traffic) shut(l *listener) {
	if t.listeners[l.address.at] != l {
		return
	}
	delete(t.listeners, l.address.at)
	close(l.done)
	for {
		select {
		case c := <-l.waiting:
			c.end.fail(syscall.ECONNRESET)
		default:
			return
		}
	}
}

// link is the link of a path, made on its first use.
func (t *traffic) link(p path) *link {
	if t.links[p] == nil {
		t.links[p] = &link{latency: t.Latency, bandwidth: t.Bandwidth}
	}
	return t.links[p]
}

// frozen is nil, or a channel that is closed when the first frozen direction of a path thaws.
func (t *traffic) frozen(p path) chan struct{} {
	if thawed := t.link(p).thawed; thawed != nil {
		return thawed
	}
	return t.link(p.back()).thawed
}

// after runs f at a later time, unless the network is closed before; now, if d is 0.
func (t *traffic) after(d time.Duration, f func()) {
	if d <= 0 {
		f()
		return
	}
	t.timers = append(t.timers, time.AfterFunc(d, func() {
		t.locked(func() {
			if !t.closed {
				f()
			}
		})
	}))
}

// between lists the connections of a path, whichever end was the first.
func (t *traffic) between(p path) []*end {
	var found []*end
	for e := range t.ends {
		if e.out.path == p || e.in.path == p {
			found = append(found, e)
		}
	}
	slices.SortFunc(found, func(a, b *end) int { return a.number - b.number })
	return found
}

// end is what one end of a connection holds.
type end struct {
	traffic  *traffic
	number   int
	in, out  *lane
	peer     *end // the other end
	closed   bool
	deadline time.Time
	grants   map[uint64]grant // to the peer, by their keys
}

// join makes a connection and returns its two ends.
func (t *traffic) join(p path) (near, far *end) {
	out, back := t.lane(p), t.lane(p.back())
	out.back, back.back = back, out
	near = &end{traffic: t, number: t.lastPort, in: back, out: out}
	far = &end{traffic: t, number: t.lastPort, in: out, out: back}
	near.peer, far.peer = far, near
	t.ends[near] = struct{}{}
	return near, far
}

// close ends the stream behind what was written.
func (e *end) close() error {
	if e.closed {
		return net.ErrClosed
	}
	e.closed = true
	e.out.queue(chunk{fin: true})
	e.in.chunks = nil // what was not read is lost, and frees no room
	signal(e.in.readable)
	signal(e.out.writable)
	if e.peer.closed {
		e.forget()
	}
	return nil
}

// forget removes the connection from those that faults apply to.
func (e *end) forget() {
	delete(e.traffic.ends, e)
	delete(e.traffic.ends, e.peer)
}

// fail ends both directions of the connection for both ends, at once.
func (e *end) fail(err error) {
	e.in.fail(err)
	e.out.fail(err)
	e.forget()
}
