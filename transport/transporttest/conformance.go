package transporttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Backend is a transport under test.
type Backend struct {
	// New makes the transport of a node with that job secret and handshake timeout (0: the default).
	New func(secret []byte, handshakeTimeout time.Duration) transport.Transport
	// Address is where to listen, with a port that the backend picks.
	Address string
	// MaxBuffered bounds the bytes that can lie between a sender and a reader who does not read.
	MaxBuffered int
	// Silence makes the links between the nodes silent: nothing arrives and no end is notified. nil if
	// the backend cannot.
	Silence func()

	// Integrity is what has authentication tags, "control" or "all". "" if nothing does, because the stream protects its
	// bytes itself: tests that tamper with frames are skipped.
	Integrity string

	// Bytes without authentication: from a peer that connects, and from one that listens.
	RawDial   func(address string) (net.Conn, error)
	RawListen func() (net.Listener, error)
}

// Within runs one test: InRealTime, or synctest.Test for backends in virtual time.
type Within func(t *testing.T, test func(t *testing.T))

// InRealTime just runs the test.
func InRealTime(t *testing.T, test func(t *testing.T)) { test(t) }

// Conformance runs the tests of what package transport promises on a backend. make is called anew
// for each of them. The tests of registered memory and one-sided writes are skipped where the transport is
// no transport.Registrar or its connections are no transport.OneSided.
func Conformance(t *testing.T, within Within, make func(t *testing.T) Backend) {
	groups := []map[string]func(*bench){frameTests, sendTests, endTests, authTests, connectTests, memoryTests}
	if make(t).Integrity != "" {
		groups = append(groups, tamperTests)
	}
	for _, group := range groups {
		for name, test := range group {
			t.Run(name, func(t *testing.T) {
				within(t, func(t *testing.T) { test(&bench{t, make(t)}) })
			})
		}
	}
}

const (
	// patience is the timeout of what should happen, so that a test fails instead of hanging.
	patience = 2 * time.Minute
	// soon is the limit of what is expected to time out.
	soon = time.Second
)

var secret = []byte("the secret of this job")

// bench is a backend and the test that runs on it.
type bench struct {
	*testing.T
	Backend
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// check is must for goroutines beside the test's.
func (b *bench) check(err error) {
	b.Helper()
	if err != nil {
		b.Error(err)
	}
}

// node is the transport of a node that knows the secret.
func (b *bench) node() transport.Transport { return b.New(secret, 0) }

// listen listens until the test ends.
func (b *bench) listen(t transport.Transport) transport.Listener {
	b.Helper()
	l, err := t.Listen(b.Address)
	b.must(err)
	b.Cleanup(func() { l.Close() })
	return l
}

// dial connects until the test ends.
func (b *bench) dial(address string) (transport.Conn, error) {
	return b.dialWithin(patience, b.node(), address)
}

func (b *bench) dialWithin(d time.Duration, t transport.Transport, address string) (transport.Conn, error) {
	ctx, cancel := context.WithTimeout(b.Context(), d)
	defer cancel()
	c, err := t.Dial(ctx, address)
	if err == nil {
		b.guard(c)
	}
	return c, err
}

// refused dials where nobody listens, and is the error. A crowded machine may not end one attempt before the deadline: then
// there is another one with more time.
func (b *bench) refused(address string) error {
	b.Helper()
	b.keep(address)
	const text = "connection refused"
	dialer := b.node()
	_, err := b.dialWithin(soon/2, dialer, address)
	for d := soon; d < patience && !strings.Contains(fmt.Sprint(err), text); d *= 2 {
		_, err = b.dialWithin(d, dialer, address)
	}
	b.wantError(err, context.DeadlineExceeded, text)
	return err
}

// keep holds a TCP port that was listened at, without listening, so that no other process gets it and accepts connections.
func (b *bench) keep(address string) {
	b.Helper()
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return // a transport with addresses of its own
	}
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	b.must(err)
	b.Cleanup(func() { syscall.Close(fd) })
	b.must(syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	b.must(syscall.Bind(fd, &syscall.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}))
}

// accept takes the next connection, until the test ends.
func (b *bench) accept(l transport.Listener) transport.Conn {
	b.Helper()
	c, err := l.Accept()
	b.must(err)
	b.guard(c)
	return c
}

// Connect makes a connection over a listener at the address and returns its two ends, which are closed when the test ends.
func Connect(t testing.TB, dialer, owner transport.Transport, address string) (dialed, accepted transport.Conn) {
	t.Helper()
	l, err := owner.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if dialed, err = dialer.Dial(t.Context(), l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if accepted, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialed.Close(); accepted.Close() })
	return dialed, accepted
}

// Payload reads the payload of the frame whose header has been read.
func Payload(c transport.Conn, h *wire.Header) ([]byte, error) {
	payload := make([]byte, h.Length)
	return payload, c.ReadPayload(payload)
}

// Frame reads the next frame of a connection and calls f with it, or with each frame of a batch, and returns f's first error.
func Frame(c transport.Conn, f func(h *wire.Header, payload []byte) error) error {
	var h wire.Header
	if err := c.ReadHeader(&h); err != nil {
		return err
	}
	if h.Type == wire.TypeBatch {
		var b wire.Batch
		if err := transport.ReadBatch(c, &h, &b, make([]byte, transport.BatchBytes)); err != nil {
			return err
		}
		return b.Frames(f)
	}
	payload, err := Payload(c, &h)
	if err != nil {
		return err
	}
	return f(&h, payload)
}

// guard closes a connection when the test ends, or has not ended for too long.
func (b *bench) guard(c interface{ Close() error }) {
	timer := time.AfterFunc(patience, func() { c.Close() })
	b.Cleanup(func() {
		timer.Stop()
		c.Close()
	})
}

// pair makes a connection and returns its two ends.
func (b *bench) pair() (dialed, accepted transport.Conn) {
	b.Helper()
	l := b.listen(b.node())
	dialed, err := b.dial(l.Addr().String())
	b.must(err)
	return dialed, b.accept(l)
}

// frame makes a push with a unique payload.
func frame(rank, number, size int) (wire.Header, []byte) {
	payload := make([]byte, size)
	fill(payload, rank, number)
	return wire.Header{Type: wire.TypePush, Rank: uint16(rank), Iteration: uint64(number), Length: uint32(size)}, payload
}

func fill(payload []byte, rank, number int) {
	word := uint64(rank+1)*0x9e3779b97f4a7c15 ^ uint64(number)<<20
	for len(payload) >= 8 {
		binary.LittleEndian.PutUint64(payload, word)
		payload, word = payload[8:], word+1
	}
	for i := range payload {
		payload[i] = byte(word) + byte(i)
	}
}

// buffers are frames as they are sent, with empty buffers and odd pieces among them.
func buffers(h wire.Header, payload []byte) net.Buffers {
	half := len(payload) / 2
	return net.Buffers{nil, h.Append(nil), payload[:half], {}, payload[half:]}
}

// send sends a frame.
func (b *bench) send(c transport.Conn, rank, number, size int) {
	b.Helper()
	b.check(c.Send(buffers(frame(rank, number, size))))
}

// receive reads the next frame and checks it against its header.
func (b *bench) receive(c transport.Conn) (h wire.Header, err error) {
	b.Helper()
	if err = c.ReadHeader(&h); err != nil {
		return h, err
	}
	payload, err := Payload(c, &h)
	if err != nil {
		return h, err
	}
	want := make([]byte, h.Length)
	if fill(want, int(h.Rank), int(h.Iteration)); !bytes.Equal(payload, want) {
		b.Errorf("frame %d of rank %d, %d bytes, arrived with other bytes", h.Iteration, h.Rank, h.Length)
	}
	return h, nil
}

// expect reads a frame and checks which one it is.
func (b *bench) expect(c transport.Conn, rank, number, size int) {
	b.Helper()
	h, err := b.receive(c)
	if err != nil || int(h.Rank) != rank || int(h.Iteration) != number || int(h.Length) != size {
		b.Errorf("got frame %d of rank %d with %d bytes (%v), want %d of %d with %d", h.Iteration, h.Rank, h.Length, err, number, rank, size)
	}
}

// wantError checks the kind of an error and that its text says something.
func (b *bench) wantError(err, kind error, text string) {
	b.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		b.Errorf("error %q, want %q with the text %q", err, kind, text)
	}
}
