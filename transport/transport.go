// Package transport says what a connection between two nodes promises. Backends (tcp, shm, fabric, the in-memory
// twin in transporttest) keep these promises and pass one conformance suite.
//
// A connection carries frames in order, both ways at once, between two nodes that have proved to
// each other that they know the job secret before anything else was parsed. Nothing is lost while it
// lives; when it ends, both sides get the reason within the deadline of the backend. It also ends where the
// peer's process no longer runs, though its host still acknowledges (SIGSTOP): idle connections show that their
// process runs (stream/watch.go), so that whoever shares a connection watches each other, with the help of nobody else.
//
// What excludes goroutines here, in the order in which one holds several:
//
//  1. outbox.Outbox.busy, the right to send for an outbox. It is no mutex, because it passes from one goroutine to another. Its
//     holder calls the role's queue and the owners of frames, which take locks of the role.
//  2. stream.turn, the right to send on a connection, no mutex for the same reason. Nothing is called under it but the byte
//     stream; nobody acquires it with a lock held.
//  3. control's locks (control/locks.go), stream.Listener.mu, stream.watch.mu and Set.mu: one at a time, under which a byte stream is
//     closed at most. Client.setTurn, a channel in place of a lock, is held around a collective call on process sets, before them.
//  4. fabric.conn.mu, then fabric.region.mu or fabric.device.mu, then fabric.device.up: under all of them libfabric is called, and
//     nothing of a role.
//  5. transporttest's locks, of the twin and of the watch of a test. Nothing is called under them.
//
// Only busy is held while code of a role is called.
package transport

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"syscall"

	"github.com/paceline/paceline/transport/wire"
)

// Conn is one authenticated connection.
//
// One goroutine reads, any number send. The memory behind the buffers given to Send is read until
// Send returns and must not change before; the memory given to ReadPayload is written until it returns.
type Conn interface {
	// Send writes the buffers, whole frames one behind the other, in one vectored write where the
	// backend can. It returns when the backend has taken every byte (memory may be used again) or
	// the connection has failed. Sends do not mix. It consumes the slice itself, as net.Buffers does.
	Send(buffers net.Buffers) error

	// TrySend is Send that never waits for the peer: it takes what fits now and returns the rest of
	// the buffers, empty when all was taken. It reports busy, and takes nothing, when another
	// sender holds the connection. Whoever got a rest must Send it before anybody else's frames;
	// the connection stays with that caller until then. A rest is known by the memory that it begins
	// with: Send, or TrySend again, the returned buffers and no copies.
	TrySend(buffers net.Buffers) (rest net.Buffers, busy bool, err error)

	// ReadHeader reads the header of the next frame. The payload of the one before must have been
	// read whole. After a header that does not decode nothing more is sent; the reader closes. io.EOF is
	// the peer's close between two frames.
	ReadHeader(h *wire.Header) error

	// ReadPayload fills b with the next bytes of the current frame's payload.
	ReadPayload(b []byte) error

	// RemoteAddr is the peer's address, for messages.
	RemoteAddr() net.Addr

	// Close ends the connection. Both sides' reads and sends return. It may be called twice.
	Close() error
}

// Listener accepts connections whose peer has proved that it knows the job secret. One that does
// not prove it is logged and closed by the backend, and never reaches Accept.
type Listener interface {
	Accept() (Conn, error) // net.ErrClosed after Close
	Addr() net.Addr
	// Expect says how many connections a job opens at its start, perhaps all at once and from one address: the listener
	// makes room for so many, and for as many that others open.
	Expect(connections int)
	Close() error
}

// Transport makes connections.
type Transport interface {
	// Kind is the transport's name in addresses and messages. The net.Addr of its listeners and connections have
	// it as their Network.
	Kind() string
	// Listen listens at an address in the notation of the kind; one that can choose by itself does so where address is "".
	Listen(address string) (Listener, error)
	// Dial connects to an address in the notation of the kind. It returns when ctx ends at the latest.
	Dial(ctx context.Context, address string) (Conn, error)
}

// Once is a context in which Dial makes one attempt: a peer that is not there yet is an error.
func Once(ctx context.Context) context.Context { return context.WithValue(ctx, once{}, true) }

// IsOnce reports whether a context is of Once.
func IsOnce(ctx context.Context) bool { return ctx.Value(once{}) != nil }

type once struct{}

// Listening is a context in which the peer listens, if it has not ended: Dial takes a refused connection for its end, and does not try again.
func Listening(ctx context.Context) context.Context { return context.WithValue(ctx, listening{}, true) }

// IsListening reports whether a context is of Listening.
func IsListening(ctx context.Context) bool { return ctx.Value(listening{}) != nil }

type listening struct{}

// SweepsPerTimeout is how often nodes look for peers that have fallen silent, within the peer timeout. One silence is noticed on different connections in different sweeps:
// who hears of it from several sides waits as many sweeps as that takes.
const SweepsPerTimeout = 32

// Silent reports whether a connection ended because nothing was heard of the peer: its process is stopped, or its host or the network to it is down.
// A process that ends closes its connections.
func Silent(err error) bool {
	return slices.ContainsFunc([]error{os.ErrDeadlineExceeded, syscall.ETIMEDOUT, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.ENETDOWN},
		func(silence error) bool { return errors.Is(err, silence) })
}

// ErrStopped is wrapped by errors of a connection that ends when this process runs again after a time in
// which it did not: it was the peer of all others that they have given up.
var ErrStopped = errors.New("this process itself did not run")

// ErrAuth is wrapped by errors of a handshake in which the peer did not prove that it knows the job
// secret, or did not speak the protocol at all.
var ErrAuth = errors.New("authentication failed")

// ErrElsewhere is wrapped by errors of a Dial to an address that this process cannot reach by the kind, because it is of
// another host.
var ErrElsewhere = errors.New("the address is of another host")

// ErrIntegrity is wrapped by the error that ends a connection on which bytes came that its peer did not send so: changed,
// repeated, dropped, or in another order.
var ErrIntegrity = errors.New("integrity check failed")
