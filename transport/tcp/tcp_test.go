package tcp

import (
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// loopback is TCP over this machine's loopback interface, with buffers that are soon full.
func loopback(config Config) transporttest.Backend {
	integrity := config.Integrity
	if integrity == "" && config.TLS == nil {
		integrity = "control" // as both ends are on this host
	}
	config.SendBuffer, config.ReceiveBuffer = 64<<10, 64<<10
	return transporttest.Backend{
		New: func(secret []byte, handshakeTimeout time.Duration) transport.Transport {
			config := config
			config.Secret, config.HandshakeTimeout = secret, handshakeTimeout
			return New(config)
		},
		Integrity:   integrity,
		Address:     "127.0.0.1:0",
		MaxBuffered: 1 << 20, // the kernel doubles what it is asked for, and counts its own overhead
		RawDial:     func(address string) (net.Conn, error) { return net.Dial("tcp", address) },
		RawListen:   func() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") },
	}
}

func TestConformance(t *testing.T) {
	for name, config := range map[string]Config{
		"plain":                {},
		"with tags on all":     {Integrity: "all"},
		"TLS over two sockets": {TLS: certificate(t), Sockets: 2},
	} {
		t.Run(name, func(t *testing.T) {
			transporttest.Conformance(t, transporttest.InRealTime, func(*testing.T) transporttest.Backend { return loopback(config) })
		})
	}
}

// certificate makes the TLS configuration of the nodes of a job, which trust each other alone.
func certificate(t *testing.T) *tls.Config {
	job := newAuthority(t)
	return job.node("127.0.0.1", time.Now().Add(time.Hour), job)
}

// connect makes a connection and returns its two ends.
func connect(t testing.TB, config Config) (dialed, accepted transport.Conn) {
	t.Helper()
	config.Secret = []byte("secret")
	tcp := New(config)
	return transporttest.Connect(t, tcp, tcp, "127.0.0.1:0")
}

func TestAPeerThatTakesNothingIsNoticedAfterThePeerTimeout(t *testing.T) {
	for name, tls := range map[string]*tls.Config{"plain": nil, "TLS": certificate(t)} {
		t.Run(name, func(t *testing.T) {
			x, y := connect(t, Config{PeerTimeout: time.Second, SendBuffer: 64 << 10, ReceiveBuffer: 64 << 10, TLS: tls})
			h := wire.Header{Type: wire.TypePush, Length: 8 << 20}
			start := time.Now()
			err := x.Send(net.Buffers{h.Append(nil), make([]byte, h.Length)})
			if !errors.Is(err, syscall.ETIMEDOUT) || !strings.Contains(err.Error(), y.RemoteAddr().Network()) {
				t.Errorf("error %v, want a timeout", err)
			}
			if took := time.Since(start); took > time.Minute { // the kernel's own patience is many
				t.Errorf("it took %v", took)
			}
		})
	}
}

func TestThePeerTimeoutMayBeADay(t *testing.T) {
	tcp := New(Config{Secret: []byte("secret"), PeerTimeout: 24 * time.Hour}) // the longest that settings allow
	l, err := tcp.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x, err := tcp.Dial(transport.Once(t.Context()), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	y, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	y.Close()
}

func TestAnUntrustedCertificateIsRefused(t *testing.T) {
	l, err := New(Config{Secret: []byte("secret"), TLS: certificate(t)}).Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = New(Config{Secret: []byte("secret"), TLS: certificate(t)}).Dial(t.Context(), l.Addr().String())
	if !errors.Is(err, transport.ErrAuth) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("error %v, want transport.ErrAuth about the certificate", err)
	}
}

func TestRefusedConnectionsAreLoggedWithTheirAddress(t *testing.T) {
	core, logged := observer.New(zap.WarnLevel)
	l, err := New(Config{Secret: []byte("secret"), Log: zap.New(core)}).Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, err = New(Config{Secret: []byte("wrong")}).Dial(t.Context(), l.Addr().String())
	if !errors.Is(err, transport.ErrAuth) {
		t.Error(err)
	}
	l.Close()
	entries := logged.FilterMessage("refused a connection").All()
	if len(entries) != 1 || !strings.HasPrefix(entries[0].ContextMap()["peer"].(string), "127.0.0.1:") {
		t.Errorf("logged %v", entries)
	}
}

// pingPong sends frames to and fro over one connection; step does one round.
func pingPong(t testing.TB, size int, try bool) (step func()) {
	x, y := connect(t, Config{})
	header := (&wire.Header{Type: wire.TypePush, Length: uint32(size)}).Append(nil)
	go func() {
		var h wire.Header
		payload, out := make([]byte, size), make(net.Buffers, 2)
		for y.ReadHeader(&h) == nil && y.ReadPayload(payload) == nil {
			out[0], out[1] = header, payload
			if y.Send(out) != nil {
				return
			}
		}
	}()
	var h wire.Header
	payload, out := make([]byte, size), make(net.Buffers, 2)
	return func() {
		out[0], out[1] = header, payload
		rest := out
		var err error
		if try {
			rest, _, err = x.TrySend(out)
		}
		if err == nil {
			err = x.Send(rest)
		}
		if err == nil {
			err = x.ReadHeader(&h)
		}
		if err == nil {
			err = x.ReadPayload(payload)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestFramesTakeNoMemory(t *testing.T) {
	for _, try := range []bool{false, true} {
		for _, size := range []int{100, 300_000} {
			if n := testing.AllocsPerRun(100, pingPong(t, size, try)); n > 0 {
				t.Errorf("%v allocations for a frame of %d bytes and its answer, TrySend %v", n, size, try)
			}
		}
	}
}

func BenchmarkPingPong(b *testing.B) {
	for _, c := range []struct {
		name string
		size int
		try  bool
	}{{"Send 4KiB", 4 << 10, false}, {"TrySend 4KiB", 4 << 10, true}, {"Send 4MiB", 4 << 20, false}} {
		b.Run(c.name, func(b *testing.B) {
			step := pingPong(b, c.size, c.try)
			b.SetBytes(2 * int64(c.size))
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
		})
	}
}
