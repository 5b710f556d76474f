// Package tcp carries frames over TCP, the backend that works everywhere.
//
// A send is one vectored write (writev) from the memory of its buffers. Read-ahead is small, so large
// payloads go from the kernel straight to their destination.
package tcp

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/libp2p/go-reuseport"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

// Kind is the name of TCP in addresses.
const Kind = "tcp"

// Config is common to the TCP connections of one node.
type Config struct {
	Secret []byte // the job secret
	// TLS, if set, encrypts: connections begin with TLS 1.3 or newer, and the job secret is proved inside.
	// Writes are then plain ones, and TrySend writes nothing itself.
	TLS              *tls.Config
	Integrity        string        // without TLS, what has authentication tags, as stream.Config has it
	HandshakeTimeout time.Duration // for a new connection until both ends are known; 0 is 10 s
	// PeerTimeout is how long a peer may leave data unacknowledged, or not answer on an idle
	// connection, before the connection fails; 0 is 10 s. A peer that acknowledges but reads no data for that
	// long also counts as gone, and so does one that is stopped (stream.Config).
	PeerTimeout time.Duration
	// SendBuffer is the kernel's send buffer in bytes; 0 lets the kernel tune it. A bounded one keeps the
	// connections that share a link at the same window, and so at the same share of it.
	SendBuffer    int
	ReceiveBuffer int         // bytes of the kernel's receive buffer; 0 lets the kernel tune it
	Congestion    string      // congestion control; the system's if "" or refused by the kernel
	Sockets       int         // listening sockets on one port, among which the kernel spreads connections; 0 is 1
	Log           *zap.Logger // refused connections; nil is no log
}

// New makes the TCP transport. Addresses are "host:port".
func New(config Config) transport.Transport {
	t := &network{Config: config, stream: stream.Config{
		Secret: config.Secret, HandshakeTimeout: config.HandshakeTimeout, PeerTimeout: config.PeerTimeout, Integrity: config.Integrity, Log: config.Log,
	}.WithDefaults()}
	t.PeerTimeout = t.stream.PeerTimeout
	if config.TLS != nil {
		t.stream.Secure = secure(config.TLS)
	}
	return t
}

type network struct {
	Config
	stream stream.Config
}

// Kind implements transport.Transport.
func (t *network) Kind() string { return Kind }

// Listen implements transport.Transport. Port 0 picks a free one.
func (t *network) Listen(address string) (transport.Listener, error) {
	sockets, err := t.listen(address, max(1, t.Sockets))
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return t.stream.Listen(sockets...), nil
}

// Dial implements transport.Transport.
func (t *network) Dial(ctx context.Context, address string) (transport.Conn, error) {
	dialer := net.Dialer{Control: t.control, KeepAlive: -1} // tune sets keep-alive
	dialer.SetMultipathTCP(false)
	return t.stream.Dial(ctx, address, func(ctx context.Context) (net.Conn, error) {
		nc, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		return t.tune(nc)
	})
}

// listen opens n sockets on one address.
func (t *network) listen(address string, n int) ([]net.Listener, error) {
	config := net.ListenConfig{Control: t.control, KeepAlive: -1}
	config.SetMultipathTCP(false)
	first, err := config.Listen(context.Background(), "tcp", address)
	if err != nil {
		return nil, err
	}
	if n == 1 {
		return []net.Listener{tuned{first, t}}, nil
	}
	// Sockets that share a port would also share it with another job's sockets, and each would get half of
	// the connections. Binding the port exclusively first shows that no other job has it.
	address = first.Addr().String()
	first.Close()
	config.Control = func(network, address string, c syscall.RawConn) error {
		if err := reuseport.Control(network, address, c); err != nil {
			return err
		}
		return t.control(network, address, c)
	}
	sockets := make([]net.Listener, 0, n)
	for range n {
		l, err := config.Listen(context.Background(), "tcp", address)
		if err != nil {
			for _, s := range sockets {
				s.Close()
			}
			return nil, err
		}
		sockets = append(sockets, tuned{l, t})
	}
	return sockets, nil
}

// control sets the options that must be set before a socket is bound or connected: the sizes of the buffers,
// which determine the window advertised to the peer, and the congestion control, which accepted connections
// inherit from their listener.
func (t *network) control(_, _ string, c syscall.RawConn) error {
	if t.Congestion != "" {
		if err := c.Control(func(fd uintptr) {
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, t.Congestion)
		}); err != nil {
			return err
		}
	}
	return setOptions(c, []option{
		{unix.SOL_SOCKET, unix.SO_SNDBUF, t.SendBuffer},
		{unix.SOL_SOCKET, unix.SO_RCVBUF, t.ReceiveBuffer},
	})
}

// tuned is a listening socket whose connections are tuned.
type tuned struct {
	net.Listener
	network *network
}

// Unwrap implements stream.Wrapper.
func (l tuned) Unwrap() net.Listener { return l.Listener }

func (l tuned) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return l.network.tune(nc)
}

// maxKeepIdle is the longest TCP_KEEPIDLE in seconds that Linux accepts.
const maxKeepIdle = 32767

// tune sets a new connection for low latency and for detection of a lost peer.
func (t *network) tune(nc net.Conn) (net.Conn, error) {
	patience := stream.Silence(t.PeerTimeout) // a process that is stopped for the timeout takes nothing meanwhile
	s, err := newSocket(nc.(*net.TCPConn), patience)
	if err == nil {
		second := int((t.PeerTimeout + time.Second - 1) / time.Second) // the kernel counts these in seconds
		err = setOptions(s.raw, []option{
			{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(patience.Milliseconds())},
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, min(max(1, second/2), maxKeepIdle)},
			{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, max(1, second/5)},
			{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 3},
		})
	}
	if err != nil {
		s.Close()
		return nil, fmt.Errorf("setting up the connection with %v: %w", nc.RemoteAddr(), err)
	}
	return s, nil
}

type option struct{ level, name, value int }

// setOptions sets socket options; the kernel's default stays where the value is 0.
func setOptions(c syscall.RawConn, options []option) (err error) {
	failed := c.Control(func(fd uintptr) {
		for _, o := range options {
			if o.value != 0 && err == nil {
				err = unix.SetsockoptInt(int(fd), o.level, o.name, o.value)
			}
		}
	})
	if failed != nil {
		return failed
	}
	return err
}
