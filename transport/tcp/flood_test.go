package tcp

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// TestHonestPeersGetInBesideAFloodThatComesAgain: of 5,000 silent peers each connects again as soon as it is dropped, all
// from the address of the honest ones; 64 of them do so at a time, so that the kernel's backlog is not what is tested.
// Handshakes have an hour: nobody gets in because another one's time is over.
func TestHonestPeersGetInBesideAFloodThatComesAgain(t *testing.T) {
	const flood, honest = 5000, 8
	tcp := New(Config{Secret: []byte("secret"), HandshakeTimeout: time.Hour})
	l, err := tcp.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	dialing := make(chan struct{}, 64)
	var came, all sync.WaitGroup
	came.Add(flood)
	for range flood {
		all.Go(func() { silent(ctx, l.Addr().String(), dialing, came.Done) })
	}
	came.Wait()
	start := time.Now()
	for range honest {
		all.Go(func() {
			attempt, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // it hangs: a crowded machine takes 20 s
			defer cancel()
			c, err := tcp.Dial(attempt, l.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			t.Logf("in after %v", time.Since(start))
			c.Close()
		})
	}
	for range honest {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	cancel()
	l.Close()
	all.Wait()
}

// silent connects again and again, says nothing and waits to be dropped.
func silent(ctx context.Context, address string, dialing chan struct{}, came func()) {
	var first sync.Once
	var dialer net.Dialer
	for ctx.Err() == nil {
		dialing <- struct{}{}
		nc, err := dialer.DialContext(ctx, "tcp", address)
		<-dialing
		if err != nil {
			continue
		}
		first.Do(came)
		stop := context.AfterFunc(ctx, func() { nc.Close() })
		_, _ = io.Copy(io.Discard, nc) // until it is dropped
		stop()
		nc.Close()
	}
	first.Do(came)
}
