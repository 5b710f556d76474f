package shm

import (
	"errors"
	"net"
	"runtime"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

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

var _ = limits.MinRing
