package stream

import (
	"errors"
	"net"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
)

// Defaults and bounds of new connections.
const (
	defaultHandshakeTimeout = 10 * time.Second
	// maxPending bounds the connections of one listener that are not authenticated or not accepted yet. Each
	// costs a goroutine and a few hundred bytes; more of them wait in the kernel's backlog.
	maxPending = 256
	// refusalsPerSecond bounds what unauthenticated peers can make a node write to its log.
	refusalsPerSecond = 10
	// maxAcceptPause is the longest pause after a failed accept, for example without file descriptors.
	maxAcceptPause = time.Second
)

// Config is common to the connections of one node.
type Config struct {
	Secret           []byte        // the job secret
	HandshakeTimeout time.Duration // from the first byte until both ends are known; 0 is 10 s
	Log              *zap.Logger   // nil: no log
	// Secure, if set, wraps a new stream before the first byte (TLS) and returns what binds the proof of the
	// secret to it. address is the dialed one, "" on the side that listens.
	Secure func(nc net.Conn, address string) (secured net.Conn, binding []byte, err error)
}

// WithDefaults sets the defaults of the zero fields.
func (c Config) WithDefaults() Config {
	if c.HandshakeTimeout <= 0 {
		c.HandshakeTimeout = defaultHandshakeTimeout
	}
	if c.Log == nil {
		c.Log = zap.NewNop()
	}
	return c
}

// Listener is a transport.Listener over one or more listening sockets with one address.
type Listener struct {
	config  Config
	sockets []net.Listener
	ready   chan *Conn    // authenticated, to be accepted
	slots   chan struct{} // one value for each pending connection
	done    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup

	mu      sync.Mutex            // the only lock of the package; a connection's turn is taken with no lock held
	pending map[net.Conn]struct{} // for Close to end; nil after Close
}

// Listen accepts from the sockets, which it owns from now on.
func (c Config) Listen(sockets ...net.Listener) *Listener {
	c = c.WithDefaults()
	c.Log = c.Log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, refusalsPerSecond, 0)
	}))
	l := &Listener{
		config:  c,
		sockets: sockets,
		ready:   make(chan *Conn),
		slots:   make(chan struct{}, maxPending),
		done:    make(chan struct{}),
		pending: make(map[net.Conn]struct{}),
	}
	for _, s := range sockets {
		l.wg.Go(func() { l.serve(s) })
	}
	return l
}

// Accept implements transport.Listener.
func (l *Listener) Accept() (transport.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Addr implements transport.Listener.
func (l *Listener) Addr() net.Addr { return l.sockets[0].Addr() }

// Close implements transport.Listener. It returns when no goroutine of the listener runs any more.
// Accepted connections stay open.
func (l *Listener) Close() error {
	l.once.Do(func() {
		close(l.done)
		for _, s := range l.sockets {
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

// serve accepts connections from one socket. A goroutine authenticates each, so that a slow peer does not
// delay others.
func (l *Listener) serve(socket net.Listener) {
	pause := time.Millisecond
	for {
		select {
		case l.slots <- struct{}{}:
		case <-l.done:
			return
		}
		nc, err := socket.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			<-l.slots
			l.config.Log.Warn("cannot accept a connection, trying again", zap.Stringer("address", socket.Addr()), zap.Error(err))
			if !l.sleep(pause) {
				return
			}
			pause = min(2*pause, maxAcceptPause)
		default:
			pause = time.Millisecond
			l.wg.Go(func() {
				l.welcome(nc)
				<-l.slots
			})
		}
	}
}

// welcome authenticates one connection and passes it to Accept.
func (l *Listener) welcome(nc net.Conn) {
	if !l.register(nc) {
		nc.Close()
		return
	}
	// Half of the slots are in use: silent peers get less time.
	timeout := l.config.HandshakeTimeout
	if len(l.slots) > maxPending/2 {
		timeout /= 4
	}
	c, err := l.config.authenticate(nc, "", time.Now().Add(timeout))
	if l.unregister(nc); err != nil {
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

// register records a pending connection. It is false if the listener is closed.
func (l *Listener) register(nc net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending == nil {
		return false
	}
	l.pending[nc] = struct{}{}
	return true
}

func (l *Listener) unregister(nc net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pending, nc)
}

// sleep is false if the listener was closed meanwhile.
func (l *Listener) sleep(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.done:
		return false
	}
}

// authenticate turns a new stream into a connection by the deadline. address is the dialed one, "" on
// the side that listens. It does not close nc.
func (c Config) authenticate(nc net.Conn, address string, deadline time.Time) (*Conn, error) {
	if err := nc.SetDeadline(deadline); err != nil {
		return nil, err
	}
	keys := auth.Keys{Secret: c.Secret}
	plain := nc
	if c.Secure != nil {
		var err error
		if nc, keys.Binding, err = c.Secure(nc, address); err != nil {
			return nil, err
		}
	}
	prove := keys.Server
	if address != "" {
		prove = keys.Client
	}
	if err := prove(nc, nc.RemoteAddr().String()); err != nil {
		return nil, err
	}
	if err := plain.SetDeadline(time.Time{}); err != nil {
		return nil, err
	}
	return newConn(nc), nil
}
