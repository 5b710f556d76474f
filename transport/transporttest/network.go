// Package transporttest has a network in memory, on which connections behave as over sockets but for
// their delays and faults, which the test decides (NewNetwork, Script); and the
// suite of tests that every backend has to pass (Conformance).
//
// Inside a testing/synctest bubble all of it runs in virtual time.
package transporttest

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

// Options are the properties of the links of a network. The zero value is a network without delays.
type Options struct {
	Latency          time.Duration // one way
	Bandwidth        int           // bytes per second, one way, of all connections from one node to another; 0 is no limit
	Buffer           int           // bytes that one direction of a connection holds between sender and reader; 0 is 64 KiB
	HandshakeTimeout time.Duration // as in tcp.Config; 0 is 10 s
	PeerTimeout      time.Duration // within which connections over a frozen link fail; 0 is 10 s
	Integrity        string        // as in stream.Config: "" has tags on everything, as each node is a host
	Kind             string        // of transport, for tests of several kinds; "" is "twin"
	Lends            bool          // nodes lend each other memory (transport.Lender), as processes of one host do
	Log              *zap.Logger   // nil is no log
}

const (
	defaultBuffer      = 64 << 10
	defaultPeerTimeout = 10 * time.Second
	defaultKind        = "twin"
	backlog            = 128 // connections that wait for Accept
)

// Network is a set of nodes with a link from each to each.
type Network struct {
	Options

	mu      sync.Mutex
	traffic *traffic          // behind mu
	arenas  map[string]*arena // by node; behind mu
}

// NewNetwork makes a network. Close it when the test is done.
func NewNetwork(o Options) *Network {
	o.Buffer, o.Kind = cmp.Or(o.Buffer, defaultBuffer), cmp.Or(o.Kind, defaultKind)
	o.PeerTimeout = cmp.Or(o.PeerTimeout, defaultPeerTimeout)
	n := &Network{Options: o, arenas: map[string]*arena{}}
	n.traffic = newTraffic(o, func(f func()) {
		n.mu.Lock()
		defer n.mu.Unlock()
		f()
	})
	return n
}

// Close ends every listener and connection, and drops the faults that a script has scheduled.
func (n *Network) Close() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.traffic.close()
}

// Node is the transport of the node with that name. Its addresses are "name:port", also where it listens at the loopback.
func (n *Network) Node(name string, secret []byte) transport.Transport {
	return &node{n, name, stream.Config{Secret: secret, HandshakeTimeout: n.HandshakeTimeout, PeerTimeout: n.PeerTimeout, Integrity: n.Integrity, Log: n.Log, Offer: withWrites}.WithDefaults()}
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
	return n.config.Listen(l), nil
}

func (n *node) Dial(ctx context.Context, address string) (transport.Conn, error) {
	return n.config.Dial(ctx, address, func(ctx context.Context) (net.Conn, error) {
		return n.network.Dial(ctx, n.name, address)
	})
}

// Listen accepts byte streams at a node, without authentication. The host of the address is the
// node's name, the loopback or missing; port 0 or the address "" picks a free port.
func (n *Network) Listen(node, address string) (net.Listener, error) {
	address = cmp.Or(address, net.JoinHostPort(node, "0"))
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if host != "" && host != node && !net.ParseIP(host).IsLoopback() {
		return nil, fmt.Errorf("listening on %s: %s is not the name of this node, %s", address, host, node)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if port == "0" {
		port = n.traffic.port()
	}
	l := &listener{network: n, node: node, address: addr{n.Kind, net.JoinHostPort(node, port)}, waiting: make(chan *conn, backlog), done: make(chan struct{})}
	if !n.traffic.listen(l) {
		return nil, fmt.Errorf("listening on %v: %w", l.address, syscall.EADDRINUSE)
	}
	return l, nil
}

// Dial makes a byte stream from a node to an address, without authentication.
func (n *Network) Dial(ctx context.Context, node, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if err := n.running(ctx, node); err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", address, err)
	}
	there := path{node, host}
	for {
		n.mu.Lock()
		thawed := n.traffic.frozen(there)
		n.mu.Unlock()
		if thawed == nil {
			break
		}
		select { // the request to connect is lost until the link thaws
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
	l := n.traffic.listeners[address]
	if l == nil || len(l.waiting) == cap(l.waiting) {
		return nil, fmt.Errorf("connecting to %s: %w", address, syscall.ECONNREFUSED)
	}
	from := addr{n.Kind, net.JoinHostPort(node, n.traffic.port())}
	here, far := n.traffic.join(there)
	lends := n.arenaOf(node)
	l.waiting <- &conn{network: n, node: host, local: l.address, remote: from, end: far, borrows: lends}
	return &conn{network: n, node: node, local: from, remote: l.address, end: here, lends: lends}, nil
}

// addr is an address of a kind.
type addr struct{ kind, at string }

func (a addr) Network() string { return a.kind }
func (a addr) String() string  { return a.at }

type listener struct {
	network *Network
	node    string
	address addr
	waiting chan *conn
	done    chan struct{}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.waiting:
		_ = l.network.running(context.Background(), l.node)
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *listener) Addr() net.Addr { return l.address }

func (l *listener) Close() error {
	l.network.mu.Lock()
	defer l.network.mu.Unlock()
	l.network.traffic.shut(l)
	return nil
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
