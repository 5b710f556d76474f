package stream

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/paceline/paceline/core/admission"
	"github.com/paceline/paceline/internal/forked"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
)

// Defaults and bounds of new connections.
const (
	defaultHandshakeTimeout = 10 * time.Second
	defaultPeerTimeout      = 10 * time.Second
	// refusalsPerSecond bounds what unauthenticated peers can make a node write to its log.
	refusalsPerSecond = 10
	// crowdedTick is how often a node logs that it drops connections for others.
	crowdedTick = 10 * time.Second
	// maxAcceptPause is the longest pause after a failed accept, for example without file descriptors.
	maxAcceptPause = time.Second
)

// Config is common to the connections of one node.
type Config struct {
	Secret           []byte        // the job secret
	HandshakeTimeout time.Duration // from the first byte until both ends are known; 0 is 10 s
	// PeerTimeout is the time within which a peer that falls silent is given up (Silence), with a margin for what follows of it; one that is stopped for
	// less than Tolerance is not. 0 is 10 s.
	PeerTimeout time.Duration
	Integrity   string      // what has authentication tags where Secure is nil: IntegrityByHost, IntegrityControl or IntegrityAll
	Log         *zap.Logger // nil: no log
	// Secure, if set, wraps a new stream before the first byte (TLS) and returns what binds the proof of the
	// secret to it. address is the dialed one, "" on the side that listens. The stream protects its bytes from then on.
	Secure func(nc net.Conn, address string) (secured net.Conn, binding []byte, err error)
	// Carrier, if set, returns what carries the frames in place of the stream over which both ends have proved the secret. It returns by the
	// stream's deadline, and closes the stream with itself, but not where it fails. accepted is true on the side that listens.
	Carrier func(nc net.Conn, session *auth.Session, accepted bool) (net.Conn, error)
	// Offer, if set, returns what users of a connection get in its place: one that can do more.
	Offer func(c *Conn) transport.Conn

	watch *watch // of all connections of the node
}

func (c *Config) offer(conn *Conn) transport.Conn {
	if c.Offer == nil {
		return conn
	}
	return c.Offer(conn)
}

// WithDefaults sets the defaults of the zero fields. The connections of the result, and of its copies, have one watch.
func (c Config) WithDefaults() Config {
	c.HandshakeTimeout = cmp.Or(c.HandshakeTimeout, defaultHandshakeTimeout)
	c.PeerTimeout = cmp.Or(c.PeerTimeout, defaultPeerTimeout)
	c.Log = cmp.Or(c.Log, zap.NewNop())
	if c.watch == nil {
		c.watch = newWatch(c.PeerTimeout)
	}
	return c
}

// Listener is a transport.Listener over one or more listening sockets with one address.
type Listener struct {
	config  Config
	crowded *zap.Logger // says that connections were dropped for others
	sockets []net.Listener
	ready   chan *Conn // authenticated, to be accepted
	done    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup

	mu       sync.Mutex                // a connection's turn is taken with no lock held
	pending  map[net.Conn]struct{}     // not accepted yet, for Close to end; nil after Close
	unproved *admission.Gate[net.Conn] // those among them that have not proved the secret
}

// errCrowded is why a peer is dropped that has done nothing wrong but to be slower than others.
var errCrowded = errors.New("it made room for another connection")

// crowdedText is what the log has of such a peer.
const crowdedText = "dropped a connection, because more had not proved the job secret than are kept; the start of a large job looks like this, " +
	"and its nodes connect again; otherwise somebody without the secret opens many connections"

// errCarrier is wrapped by the error of a handshake after which there was nothing to carry frames.
var errCarrier = errors.New("the two ends know each other, but cannot share what carries frames")

// Listen accepts from the sockets, which it owns from now on.
func (c Config) Listen(sockets ...net.Listener) *Listener {
	c = c.WithDefaults()
	crowded := sampled(c.Log, crowdedTick, 1)
	c.Log = sampled(c.Log, time.Second, refusalsPerSecond)
	l := &Listener{
		config:   c,
		crowded:  crowded,
		sockets:  sockets,
		ready:    make(chan *Conn),
		done:     make(chan struct{}),
		pending:  make(map[net.Conn]struct{}),
		unproved: admission.New[net.Conn](admission.Bounds{Total: limits.MaxUnproved, PerSource: limits.MaxUnprovedPerSource}, rand.IntN),
	}
	for _, s := range sockets {
		if c := socketOf(s); c != nil {
			forked.Note(c)
		}
		l.wg.Go(func() { l.serve(s) })
	}
	return l
}

// sampled is a log that has at most so many lines of one text in each time.
func sampled(log *zap.Logger, each time.Duration, lines int) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, each, lines, 0)
	}))
}

// Accept implements transport.Listener.
func (l *Listener) Accept() (transport.Conn, error) {
	select {
	case c := <-l.ready:
		return l.config.offer(c), nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Addr implements transport.Listener.
func (l *Listener) Addr() net.Addr { return l.sockets[0].Addr() }

// Expect implements transport.Listener.
func (l *Listener) Expect(connections int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unproved.Expect(min(connections, limits.MaxExpected))
}

func (l *Listener) bounds() admission.Bounds {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unproved.Bounds()
}

// Close implements transport.Listener. It returns when no goroutine of the listener runs any more.
// Accepted connections stay open.
func (l *Listener) Close() error {
	l.once.Do(func() {
		close(l.done)
		for _, s := range l.sockets {
			shut(s)
			s.Close()
		}
		l.mu.Lock()
		for nc := range l.pending {
			nc.Close()
		}
		l.pending = nil
		l.mu.Unlock()
	})
	l.wg.Wait()
	return nil
}

// Wrapper is a listener around another one.
type Wrapper interface{ Unwrap() net.Listener }

// shut ends listening before the socket is closed: a child that was forked has it too, and connections to it would be made still. Their end is taken for that of
// the process (transport.Listening).
func shut(l net.Listener) {
	if s := socketOf(l); s != nil {
		forked.Forget(s)
		if raw, err := s.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
		}
	}
}

// socketOf is the socket of a listener, nil for none.
func socketOf(l net.Listener) syscall.Conn {
	if w, ok := l.(Wrapper); ok {
		l = w.Unwrap()
	}
	s, _ := l.(syscall.Conn)
	return s
}

func (l *Listener) closed() bool {
	select {
	case <-l.done:
		return true
	default:
		return false
	}
}

// serve accepts connections from one socket, without a pause, so that no honest peer waits behind others in the kernel's
// backlog. A goroutine authenticates each, so that a slow peer does not delay others.
func (l *Listener) serve(socket net.Listener) {
	pause := time.Millisecond
	for {
		nc, err := socket.Accept()
		switch {
		case errors.Is(err, net.ErrClosed), err != nil && l.closed():
			return
		case err != nil:
			l.config.Log.Warn("cannot accept a connection, trying again", zap.Stringer("address", socket.Addr()), zap.Error(err))
			select {
			case <-time.After(pause):
			case <-l.done:
				return
			}
			pause = min(2*pause, maxAcceptPause)
		default:
			pause = time.Millisecond
			if l.arrive(nc) {
				l.wg.Go(func() { l.welcome(nc) })
			}
		}
	}
}

// welcome authenticates one connection and passes it to Accept.
func (l *Listener) welcome(nc net.Conn) {
	c, err := l.config.authenticate(nc, "", time.Now().Add(l.config.HandshakeTimeout), func() error { return l.proved(nc) })
	kept := l.leave(nc)
	switch {
	case err == nil:
	case !kept && errors.Is(err, net.ErrClosed), errors.Is(err, errCrowded):
		nc.Close()
		kept := l.bounds()
		l.crowded.Warn(crowdedText, zap.Stringer("peer", nc.RemoteAddr()), zap.Int("kept", kept.Total), zap.Int("kept_of_one_address", kept.PerSource))
		return
	default:
		nc.Close()
		l.config.Log.Warn("refused a connection", zap.Stringer("peer", nc.RemoteAddr()), zap.Error(err))
		return
	}
	select {
	case l.ready <- c:
	case <-l.done:
		c.Close()
	}
}

// arrive gives a new connection a place among those that are not authenticated. Another one may lose its own. It is
// false if the listener is closed.
func (l *Listener) arrive(nc net.Conn) bool {
	l.mu.Lock()
	open := l.pending != nil
	var dropped net.Conn
	if open {
		l.pending[nc] = struct{}{}
		dropped, _ = l.unproved.Arrive(nc, source(nc))
	}
	l.mu.Unlock()
	if !open {
		nc.Close()
	}
	if dropped != nil {
		dropped.Close()
	}
	return open
}

// proved has a connection leave those that may be dropped, before its peer learns that it is in. It is an error if the
// connection was dropped just then.
func (l *Listener) proved(nc net.Conn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.unproved.Leave(nc) {
		return errCrowded
	}
	return nil
}

// leave ends what the listener holds about a connection that was accepted or refused. It reports whether the connection
// had kept its place until now.
func (l *Listener) leave(nc net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pending, nc)
	return l.unproved.Leave(nc)
}

// source is the part of a peer's address that an attacker cannot vary at will: the host, of IPv6 the network.
func source(nc net.Conn) string {
	text := nc.RemoteAddr().String()
	address, err := netip.ParseAddrPort(text)
	if err != nil {
		host, _, _ := net.SplitHostPort(text)
		return host
	}
	ip := address.Addr().Unmap()
	if ip.Is6() {
		network, _ := ip.WithZone("").Prefix(64)
		return network.String()
	}
	return ip.String()
}

// authenticate turns a new stream into a connection by the deadline. address is the dialed one, "" on
// the side that listens, where proved is called between the peer's proof and the answer. It does not close nc.
func (c Config) authenticate(nc net.Conn, address string, deadline time.Time, proved func() error) (*Conn, error) {
	if err := nc.SetDeadline(deadline); err != nil {
		return nil, err
	}
	keys := auth.Keys{Secret: c.Secret, Level: c.level(nc), Proved: proved}
	plain := nc
	if c.Secure != nil {
		var err error
		if nc, keys.Binding, err = c.Secure(nc, address); err != nil {
			return nil, err
		}
		keys.Level = auth.Below
	}
	prove := keys.Server
	if address != "" {
		prove = keys.Client
	}
	session, err := prove(nc, nc.RemoteAddr().String())
	if err != nil {
		return nil, err
	}
	if c.Carrier != nil {
		if nc, err = c.Carrier(nc, session, address == ""); err != nil {
			return nil, fmt.Errorf("%w: %w", errCarrier, err)
		}
	}
	if err := plain.SetDeadline(time.Time{}); err != nil {
		nc.Close()
		return nil, err
	}
	conn := newConn(nc, session)
	conn.watch = c.watch
	c.watch.add(conn)
	return conn, nil
}
