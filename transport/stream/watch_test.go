package stream

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// slow is a stream whose Close returns when it is told to.
type slow struct {
	net.Conn
	closed chan struct{}
}

func (s slow) Close() error {
	defer func() { <-s.closed }()
	return s.Conn.Close()
}

func TestOtherConnectionsBeatWhileASilentOneIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWatch(time.Second)
		watched := func(nc net.Conn) *Conn {
			c := newConn(nc, &auth.Session{})
			c.watch = w
			w.add(c)
			return c
		}
		one, silent := net.Pipe()
		two, peer := net.Pipe()
		closed := make(chan struct{})
		x, y := watched(slow{one, closed}), watched(two)
		read := make(chan error, 1)
		go func() { read <- x.ReadHeader(new(wire.Header)) }()
		var beats atomic.Int64
		go func() {
			for {
				if _, err := io.ReadFull(peer, make([]byte, wire.HeaderSize)); err != nil {
					return
				}
				beats.Add(1)
			}
		}()
		if err := <-read; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("error %v, want one that the peer is silent", err)
		}
		before := beats.Load()
		time.Sleep(time.Second)
		if beats.Load() == before || w.stopped() > 0 {
			t.Errorf("%d beats in a second, and this process was stopped for %v", beats.Load()-before, w.stopped())
		}
		close(closed)
		for _, c := range []io.Closer{x, y, silent, peer} {
			c.Close()
		}
	})
}
