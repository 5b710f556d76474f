// Package shm carries frames between the processes of one host through shared memory: payloads never meet a socket.
//
//  1. Both ends connect over a unix socket in the abstract namespace and prove the job secret there, as over TCP.
//  2. The side that listens makes a sealed memory file with two rings, one for each direction, and a doorbell (eventfd) for
//     each of the four who may wait, and passes their descriptors over the socket. Nothing of it has a name.
//  3. From here on frames go through the rings (ring.go). Whoever finds nothing to read or no room asks for the doorbell, and
//     waits as for a socket, in Go's poller: no thread is blocked.
//  4. The socket stays open, and says nothing. Its end is the peer's end: the kernel closes it with the process.
//
// Only processes of one user share memory, and the kernel keeps all others out, so frames have no tags.
// What a peer writes into the memory is checked before it is used, and copied before it is checked.
package shm

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math/bits"
	"net"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/stream"
)

// Kind is the name of shared memory in addresses.
const Kind = "shm"

// Config is common to the connections of one node.
type Config struct {
	Secret           []byte        // the job secret
	HandshakeTimeout time.Duration // for a new connection until both ends are known; 0 is 10 s
	PeerTimeout      time.Duration // how long a peer may be stopped, as stream.Config has it; 0 is 10 s
	// Ring is how many bytes can lie between a sender and a reader, at most limits.MaxRing; it is rounded up to a power of two,
	// at least limits.MinRing. Where many connections share limits.MaxShared, new ones have less.
	Ring  int
	Arena *Arena      // passed to each peer that this process connects to; nil for none
	Log   *zap.Logger // refused connections; nil is no log
}

// New makes the transport. It is an error where the machine does not have what it needs: memory files with seals, doorbells,
// and a name for the host.
func New(config Config) (transport.Transport, error) {
	host, err := thisHost()
	if err != nil {
		return nil, err
	}
	trial, err := newSegment(limits.MinRing)
	if err != nil {
		return nil, err
	}
	trial.close()
	t := &network{host: host, arena: config.Arena, ring: 1 << bits.Len(uint(max(config.Ring, limits.MinRing)-1))}
	t.stream = stream.Config{
		Secret: config.Secret, HandshakeTimeout: config.HandshakeTimeout, PeerTimeout: config.PeerTimeout, Log: config.Log,
		Secure: protected, Carrier: t.carry,
	}.WithDefaults()
	return t, nil
}

type network struct {
	stream stream.Config
	host   string
	ring   int
	arena  *Arena
	lent   atomic.Int64 // bytes of the segments that this end has made
}

// Kind implements transport.Transport.
func (t *network) Kind() string { return Kind }

// Listen implements transport.Transport.
func (t *network) Listen(address string) (transport.Listener, error) {
	if address == "" {
		var name [8]byte
		_, _ = rand.Read(name[:]) // never fails
		address = t.host + "/" + hex.EncodeToString(name[:])
	}
	at, err := t.socket(address)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	l, err := net.ListenUnix("unix", at)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", address, err)
	}
	return t.stream.Listen(listener{l, addr(address)}), nil
}

// Dial implements transport.Transport. The address of another host is transport.ErrElsewhere, at once.
func (t *network) Dial(ctx context.Context, address string) (transport.Conn, error) {
	at, err := t.socket(address)
	if err != nil {
		return nil, fmt.Errorf("connecting to %s: %w", address, err)
	}
	return t.stream.Dial(ctx, address, func(ctx context.Context) (net.Conn, error) {
		nc, err := new(net.Dialer).DialContext(ctx, "unix", at.Name)
		if err != nil {
			return nil, err
		}
		return newSocket(nc.(*net.UnixConn), addr(address)), nil
	})
}

// protected says that a connection protects its bytes: the kernel shows them to nobody but the processes at its ends.
func protected(nc net.Conn, _ string) (net.Conn, []byte, error) { return nc, []byte(Kind), nil }

// carry moves a connection whose ends know each other from its socket to shared memory.
func (t *network) carry(nc net.Conn, _ *auth.Session, accepted bool) (net.Conn, error) {
	s := nc.(*socket)
	err := s.ofOneUser()
	if err != nil {
		return nil, err
	}
	c := &conn{socket: s, patience: stream.Silence(t.stream.PeerTimeout)}
	if accepted {
		c.shared, c.borrowed, err = t.offer(s)
	} else {
		c.shared, c.lends, err = t.accept(s)
	}
	if err != nil {
		return nil, fmt.Errorf("sharing memory with %v: %w", s.peer, err)
	}
	c.start()
	return c, nil
}

// offer makes a segment and has the peer map it. The peer's arena is nil where it has none, or this process no room for it.
func (t *network) offer(s *socket) (*segment, *borrowed, error) {
	size := t.ring
	for size > limits.MinRing && t.lent.Load()+int64(2*size) > limits.MaxShared {
		size /= 2
	}
	g, err := newSegment(size)
	if err != nil {
		return nil, nil, err
	}
	t.lent.Add(int64(len(g.memory)))
	g.closed = func() { t.lent.Add(-int64(len(g.memory))) }
	arena, err := s.exchange(g.files())
	if err != nil {
		g.close()
		return nil, nil, err
	}
	g.forget()
	return g, arena, nil
}

// accept maps the segment that the peer has made, and passes the arena. It returns that where the peer has mapped it.
func (t *network) accept(s *socket) (*segment, *Arena, error) {
	files, err := s.passed(numFiles, numFiles)
	if err != nil {
		return nil, nil, err
	}
	g, err := openSegment(files)
	if err != nil {
		return nil, nil, err
	}
	mapped, err := s.confirm(t.arena.lend())
	if err != nil {
		g.close()
		return nil, nil, err
	}
	if !mapped {
		return g, nil, nil
	}
	return g, t.arena, nil
}
