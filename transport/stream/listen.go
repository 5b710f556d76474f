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

// Defaults and bounds of making connections.
const (
	defaultHandshakeTimeout = 10 * time.Second
	// maxStrangers bounds the connections of one listener whose peer has not proved the secret yet, or
	// which nobody has accepted yet. Each costs a goroutine and a few hundred bytes; more of them wait
	// in the kernel's backlog.
	maxStrangers = 256
	// refusalsPerSecond bounds what strangers can make a node write to its log.
	refusalsPerSecond = 10
	// maxAcceptPause is the longest pause after a failed accept, such as for want of file descriptors.
	maxAcceptPause = time.Second
)

// Config is what the connections of one node have in common.
type Config struct {
	Secret           []byte        // the job secret
	HandshakeTimeout time.Duration // from the first byte until both ends are known; 0 is 10 s
	Log              *zap.Logger   // nil is no log
	// Secure, if set, wraps a new stream before anything is said on it (TLS) and returns what binds the
	// proof of the secret to it. address is what was dialed, "" on the side that listens.
	Secure func(nc net.Conn, address string) (secured net.Conn, binding []byte, err error)
}

// WithDefaults fills in what was not set.
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
	slots   chan struct{} // one value for each stranger
	done    chan struct{}
	once    sync.Once
	wg      sync.WaitGroup

	mu        sync.Mutex            // the only lock of the package; a connection's turn is taken with no lock held
	strangers map[net.Conn]struct{} // so that Close can end them; nil after Close
}

// Listen accepts from the sockets, which it owns from now on.
func (c Config) Listen(sockets ...net.Listener) *Listener {
	c = c.WithDefaults()
	c.Log = c.Log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, refusalsPerSecond, 0)
	}))
	l := &Listener{
		config:    c,
		sockets:   sockets,
		ready:     make(chan *Conn),
		slots:     make(chan struct{}, maxStrangers),
		done:      make(chan struct{}),
		strangers: make(map[net.Conn]struct{}),
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

// Close implements transport.Listener. It returns when nothing of the listener runs any more;
// connections that were accepted live on.
func (l *Listener) Close() error {
	l.once.Do(func() {
		close(l.done)
		for _, s := range l.sockets {
			s.Close()
		}
		l.mu.Lock()
		for nc := range l.strangers {
			nc.Close()
		}
		l.strangers = nil
		l.mu.Unlock()
	})
	l.wg.Wait()
	return nil
}

// serve takes connections from one socket. Each is authenticated by a goroutine of its own, so that a
// slow stranger keeps nobody else waiting.
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

// welcome authenticates one connection and hands it to Accept.
func (l *Listener) welcome(nc net.Conn) {
	if !l.meet(nc) {
		nc.Close()
		return
	}
	// Half of the places taken: whoever says nothing has to make room sooner.
	timeout := l.config.HandshakeTimeout
	if len(l.slots) > maxStrangers/2 {
		timeout /= 4
	}
	c, err := l.config.authenticate(nc, "", time.Now().Add(timeout))
	if l.part(nc); err != nil {
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

// meet notes a stranger. It is false if the listener is closed.
func (l *Listener) meet(nc net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.strangers == nil {
		return false
	}
	l.strangers[nc] = struct{}{}
	return true
}

func (l *Listener) part(nc net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.strangers, nc)
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

// authenticate turns a new stream into a connection by the deadline. address is what was dialed, ""
// on the side that listens. It does not close nc.
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
