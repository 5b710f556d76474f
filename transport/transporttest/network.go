// Package transporttest has a network in memory, on which connections behave as over sockets but for
// the time they take and the faults they meet, which the test decides (NewNetwork, Script); and the
// suite of tests that every backend has to pass (Conformance).
//
// Inside a testing/synctest bubble all of it runs in virtual time.
package transporttest

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

// Options say how the links of a network are. The zero value is a network without delays.
type Options struct {
	Latency          time.Duration // one way
	Bandwidth        int           // bytes per second, one way, of all connections from one node to another; 0 is no limit
	Buffer           int           // bytes that one direction of a connection holds between sender and reader; 0 is 64 KiB
	HandshakeTimeout time.Duration // as in tcp.Config; 0 is 10 s
	PeerTimeout      time.Duration // how long a link may be frozen before its connections fail; 0 is 10 s
	Kind             string        // of transport, for tests of several kinds; "" is "twin"
	Log              *zap.Logger   // nil is no log
}

const (
	defaultBuffer      = 64 << 10
	defaultPeerTimeout = 10 * time.Second
	defaultKind        = "twin"
	backlog            = 128 // connections that wait for Accept
)

// Network is a set of nodes, with a link from each to each, between which connections are made.
type Network struct {
	Options

	mu        sync.Mutex // guards everything that nodes, listeners, links and connections of it hold
	links     map[path]*link
	listeners map[string]*listener
	conns     map[*conn]struct{} // one end of each that is open
	timers    []*time.Timer
	lastPort  int
	regions   uint64 // that were registered
	closed    bool
}

// path is the way from one node to another.
type path struct{ from, to string }

func (p path) back() path { return path{p.to, p.from} }

// NewNetwork makes a network. Close it when the test is done.
func NewNetwork(o Options) *Network {
	if o.Buffer <= 0 {
		o.Buffer = defaultBuffer
	}
	if o.PeerTimeout <= 0 {
		o.PeerTimeout = defaultPeerTimeout
	}
	if o.Kind == "" {
		o.Kind = defaultKind
	}
	return &Network{
		Options: o, links: make(map[path]*link), listeners: make(map[string]*listener), conns: make(map[*conn]struct{}),
	}
}

// Close ends every listener and connection, and what a script still had in mind.
func (n *Network) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.closed = true
	for _, t := range n.timers {
		t.Stop()
	}
	for _, l := range n.listeners {
		l.shut()
	}
	for c := range n.conns {
		c.fail(net.ErrClosed)
	}
}

// Node is the transport of the node with that name. Its addresses are "name:port".
func (n *Network) Node(name string, secret []byte) transport.Transport {
	return &node{n, name, stream.Config{Secret: secret, HandshakeTimeout: n.HandshakeTimeout, Log: n.Log}}
}

type node struct {
	network *Network
	name    string
	config  stream.Config
}

func (n *node) Kind() string { return n.network.Kind }

func (n *node) Listen(address string) (transport.Listener, error) {
	l, err := n.network.Listen(n.name, address)
	if err != nil {
		return nil, err
	}
	return listenerOfWrites{n.config.Listen(l)}, nil
}

func (n *node) Dial(ctx context.Context, address string) (transport.Conn, error) {
	c, err := n.config.Dial(ctx, address, func(ctx context.Context) (net.Conn, error) {
		return n.network.Dial(ctx, n.name, address)
	})
	if err != nil {
		return nil, err
	}
	return withWrites(c), nil
}

// Listen accepts byte streams at a node, without authentication. The host of the address is the
// node's name or missing; port 0 picks a free one, as does the address "".
func (n *Network) Listen(node, address string) (net.Listener, error) {
	if address == "" {
		address = net.JoinHostPort(node, "0")
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if host != "" && host != node {
		return nil, fmt.Errorf("listening on %s: %s is not the name of this node, %s", address, host, node)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if port == "0" {
		n.lastPort++
		port = strconv.Itoa(n.lastPort)
	}
	address = net.JoinHostPort(node, port)
	if n.listeners[address] != nil || n.closed {
		return nil, fmt.Errorf("listening on %s: %w", address, syscall.EADDRINUSE)
	}
	l := &listener{network: n, address: n.addr(address), waiting: make(chan *conn, backlog), done: make(chan struct{})}
	n.listeners[address] = l
	return l, nil
}

// Dial makes a byte stream from a node to an address, without authentication.
func (n *Network) Dial(ctx context.Context, node, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	there := path{node, host}
	for {
		n.mu.Lock()
		thawed := n.link(there).thawed
		if thawed == nil {
			thawed = n.link(there.back()).thawed
		}
		n.mu.Unlock()
		if thawed == nil {
			break
		}
		select { // the request to connect is lost until the way is free
		case <-thawed:
		case <-ctx.Done():
			return nil, fmt.Errorf("connecting to %s: %w", address, syscall.ETIMEDOUT)
		}
	}
	if err := sleep(ctx, 2*n.Latency); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.listeners[address]
	if l == nil || len(l.waiting) == cap(l.waiting) {
		return nil, fmt.Errorf("connecting to %s: %w", address, syscall.ECONNREFUSED)
	}
	n.lastPort++
	here, far := n.join(there, n.addr(net.JoinHostPort(node, strconv.Itoa(n.lastPort))), l.address)
	l.waiting <- far
	return here, nil
}

// link is the link of a path, made on its first use.
func (n *Network) link(p path) *link {
	if n.links[p] == nil {
		n.links[p] = &link{latency: n.Latency, bandwidth: n.Bandwidth}
	}
	return n.links[p]
}

// after runs f with the network locked, as it is now, unless it is closed before.
func (n *Network) after(d time.Duration, f func()) {
	if d <= 0 {
		f()
		return
	}
	n.timers = append(n.timers, time.AfterFunc(d, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if !n.closed {
			f()
		}
	}))
}

// between lists the connections of a path, whichever end was the first.
func (n *Network) between(p path) []*conn {
	var found []*conn
	for c := range n.conns {
		if c.out.path == p || c.in.path == p {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b *conn) int { return a.number - b.number })
	return found
}

// addr is an address of a kind.
type addr struct{ kind, at string }

func (a addr) Network() string { return a.kind }
func (a addr) String() string  { return a.at }

// addr is the address at which somebody is known in the network.
func (n *Network) addr(at string) addr { return addr{n.Kind, at} }

type listener struct {
	network *Network
	address addr
	waiting chan *conn
	done    chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.waiting:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Addr() net.Addr { return l.address }

func (l *listener) Close() error {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	l.shut()
	return nil
}

// shut forgets the listener and resets the connections that nobody has accepted.
func (l *listener) shut() {
	if l.network.listeners[l.address.at] != l {
		return
	}
	delete(l.network.listeners, l.address.at)
	close(l.done)
	for {
		select {
		case c := <-l.waiting:
			c.fail(syscall.ECONNRESET)
		default:
			return
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
