package shm

import (
	"errors"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) {
	if address := os.Getenv(childAddress); address != "" {
		sendForEver(address)
		return
	}
	goleak.VerifyTestMain(m)
}

func start(t testing.TB, config Config) *network {
	t.Helper()
	made, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	return made.(*network)
}

func TestConformance(t *testing.T) {
	transporttest.Conformance(t, transporttest.InRealTime, func(t *testing.T) transporttest.Backend {
		unproved := start(t, Config{})
		return transporttest.Backend{
			New: func(secret []byte, handshakeTimeout time.Duration) transport.Transport {
				return start(t, Config{Secret: secret, HandshakeTimeout: handshakeTimeout, Ring: 64 << 10})
			},
			MaxBuffered: 64 << 10,
			RawDial: func(address string) (net.Conn, error) {
				at, err := unproved.socket(address)
				if err != nil {
					return nil, err
				}
				nc, err := net.DialUnix("unix", nil, at)
				for ; errors.Is(err, syscall.EAGAIN); nc, err = net.DialUnix("unix", nil, at) {
					runtime.Gosched() // the listener's backlog is full
				}
				return nc, err
			},
			RawListen: func() (net.Listener, error) {
				const name = "a listener of a test"
				at, _ := unproved.socket(unproved.host + "/" + name)
				l, err := net.ListenUnix("unix", at)
				return listener{l, addr(unproved.host + "/" + name)}, err
			},
		}
	})
}

// connect makes a connection and returns its two ends.
func connect(t testing.TB, config Config) (dialed, accepted transport.Conn) {
	t.Helper()
	config.Secret = []byte("secret")
	n := start(t, config)
	return transporttest.Connect(t, n, n, "")
}

func TestAPeerThatTakesNothingIsNoticedAfterThePeerTimeout(t *testing.T) {
	x, _ := connect(t, Config{PeerTimeout: 200 * time.Millisecond})
	h := wire.Header{Type: wire.TypePush, Length: 8 << 20}
	if err := x.Send(net.Buffers{h.Append(nil), make([]byte, h.Length)}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("error %v, want one that says it timed out", err)
	}
}

// overdue is what a waiter finds after its process was stopped for longer than the patience: the first deadline has passed, before the peer could run.
type overdue struct {
	syscall.RawConn
	once   sync.Once
	passed chan struct{}
}

func (o *overdue) Read(f func(fd uintptr) bool) (err error) {
	o.once.Do(func() {
		err = os.ErrDeadlineExceeded
		close(o.passed)
	})
	if err != nil {
		return err
	}
	return o.RawConn.Read(f)
}

func TestAPeerThatWasStoppedWithThisProcessMayStillRead(t *testing.T) {
	x, y := connect(t, Config{Ring: limits.MinRing})
	sends := x.(*stream.Conn).NetConn().(*conn).sends
	late := &overdue{RawConn: sends.raw, passed: make(chan struct{})}
	sends.raw = late
	h := wire.Header{Type: wire.TypePush, Length: 8 * limits.MinRing}
	sent := make(chan error, 1)
	go func() { sent <- x.Send(net.Buffers{h.Append(nil), make([]byte, h.Length)}) }()
	<-late.passed
	go func() {
		if err := y.ReadHeader(&h); err == nil {
			_ = y.ReadPayload(make([]byte, h.Length))
		}
	}()
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

func TestManyConnectionsShareABoundedMemory(t *testing.T) {
	n := start(t, Config{Secret: []byte("secret"), Ring: limits.MaxRing - 1})
	l, err := n.Listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var sizes []int
	for range 6 {
		x, err := n.Dial(t.Context(), l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		y, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close(); y.Close() })
		sizes = append(sizes, len(memoryOf(x).out.data)>>20, len(memoryOf(y).in.data)>>20)
	}
	if want := []int{64, 64, 32, 32, 16, 16, 8, 8, 4, 4, 2, 2}; !slices.Equal(sizes, want) {
		t.Errorf("rings of %v MiB, want %v", sizes, want)
	}
}

// pingPong sends frames to and fro over one connection; step does one round.
func pingPong(t testing.TB, size int) (step func()) {
	x, y := connect(t, Config{Ring: 512 << 10})
	header := (&wire.Header{Type: wire.TypePush, Length: uint32(size)}).Append(nil)
	pass := func(from, to transport.Conn) (round func() error) {
		var h wire.Header
		payload, out := make([]byte, size), make(net.Buffers, 2)
		return func() error {
			if err := from.ReadHeader(&h); err != nil {
				return err
			}
			if err := from.ReadPayload(payload); err != nil {
				return err
			}
			out[0], out[1] = header, payload
			return to.Send(out)
		}
	}
	there, back := pass(y, y), pass(x, x)
	go func() {
		for there() == nil {
		}
	}()
	if err := x.Send(net.Buffers{header, make([]byte, size)}); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := back(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFramesTakeNoMemory(t *testing.T) {
	for _, size := range []int{100, 300_000, 3_000_000} {
		if n := testing.AllocsPerRun(100, pingPong(t, size)); n > 0 {
			t.Errorf("%v allocations for a frame of %d bytes and its answer", n, size)
		}
	}
}

func BenchmarkPingPong(b *testing.B) {
	for name, size := range map[string]int{"4KiB": 4 << 10, "4MiB": 4 << 20} {
		b.Run(name, func(b *testing.B) {
			step := pingPong(b, size)
			b.SetBytes(2 * int64(size))
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}
