package transporttest

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// twin is the simulated network as a backend: the listening node is b.
func twin(t *testing.T, o Options) Backend {
	n := NewNetwork(o)
	t.Cleanup(n.Close)
	return Backend{
		New:              func(secret []byte) transport.Transport { return n.Node("b", secret) },
		Address:          "b:0",
		HandshakeTimeout: n.HandshakeTimeout,
		MaxBuffered:      n.Buffer + 1024,
		Silence: func() {
			if err := n.Script("at 0s b<->b freeze"); err != nil {
				t.Error(err)
			}
		},
		RawDial:   func(address string) (net.Conn, error) { return n.Dial(context.Background(), "b", address) },
		RawListen: func() (net.Listener, error) { return n.Listen("b", "b:0") },
	}
}

func TestConformance(t *testing.T) {
	for name, o := range map[string]Options{
		"without delays":    {HandshakeTimeout: 300 * time.Millisecond},
		"over a fast link":  {HandshakeTimeout: 300 * time.Millisecond, Latency: 50 * time.Microsecond, Bandwidth: 1 << 30, Buffer: 256 << 10},
		"over a thin line":  {HandshakeTimeout: 3 * time.Second, Latency: 20 * time.Millisecond, Bandwidth: 4 << 20},
		"with tiny buffers": {HandshakeTimeout: 300 * time.Millisecond, Latency: time.Microsecond, Buffer: 1000},
	} {
		t.Run(name, func(t *testing.T) {
			Conformance(t, synctest.Test, func(t *testing.T) Backend { return twin(t, o) })
		})
	}
}
