package transporttest

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// twin is the simulated network as a backend: the listening node is b.
func twin(t *testing.T, o Options) Backend {
	n := NewNetwork(o)
	t.Cleanup(n.Close)
	integrity := o.Integrity
	if integrity == "" {
		integrity = "control" // as all nodes are one host here
	}
	return Backend{
		Integrity: integrity,
		New: func(secret []byte, handshakeTimeout time.Duration) transport.Transport {
			return &node{n, "b", stream.Config{Secret: secret, HandshakeTimeout: handshakeTimeout, Integrity: o.Integrity, Offer: withWrites}}
		},
		Address:     "b:0",
		MaxBuffered: n.Buffer + 1024,
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
		"without delays":    {},
		"over a thin line":  {Latency: 20 * time.Millisecond, Bandwidth: 4 << 20},
		"with tags on all":  {Integrity: "all"},
		"with tiny buffers": {Latency: time.Microsecond, Buffer: 3000},
	} {
		t.Run(name, func(t *testing.T) {
			Conformance(t, synctest.Test, func(t *testing.T) Backend { return twin(t, o) })
		})
	}
}

func TestSilentPeersBeyondTheBoundDoNotDelayThePeerAfterThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{t, twin(t, Options{Latency: time.Millisecond})}
		l := b.listen(b.New(secret, time.Hour))
		b.flood(l.Addr().String(), 5000)
		start := time.Now()
		b.admits(l)
		if took := time.Since(start); took > time.Second {
			t.Errorf("the peer got in after %v, want no second", took)
		}
	})
}

// TestAThousandNodesOfOneHostConnectAtOnce where the listener expects so many: none is dropped, and the log is empty. Where it
// does not, the log says what it is, and all get in all the same.
func TestAThousandNodesOfOneHostConnectAtOnce(t *testing.T) {
	const nodes = 1000
	for _, expected := range []int{nodes, 0} {
		synctest.Test(t, func(t *testing.T) {
			b := &bench{t, twin(t, Options{Latency: time.Millisecond})}
			core, log := observer.New(zap.DebugLevel)
			owner := b.node().(*node)
			owner.config.Log = zap.New(core)
			l := b.listen(owner)
			l.Expect(expected)
			var dialing sync.WaitGroup
			for range nodes {
				dialing.Go(func() {
					_, err := b.dial(l.Addr().String())
					b.check(err)
				})
			}
			for range nodes {
				b.accept(l)
			}
			dialing.Wait()
			switch said := log.All(); {
			case expected > 0 && len(said) > 0:
				t.Errorf("dropped where %d are expected: %v", expected, said)
			case expected == 0 && (len(said) == 0 || !strings.Contains(said[0].Message, "the start of a large job looks like this")):
				t.Errorf("the log: %v", said)
			}
		})
	}
}
