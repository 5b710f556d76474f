package transporttest

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
	"github.com/paceline/paceline/transport/wire"
)

// wired is a connection from node a to node b, and the network that it is in.
type wired struct {
	*bench
	*Network
	a, b transport.Conn
}

// onALink runs a test in virtual time with a connection between two nodes.
func onALink(t *testing.T, o Options, test func(w wired)) {
	synctest.Test(t, func(t *testing.T) {
		o.Integrity = "control" // payloads have no tags, which the tests would have to count
		n := NewNetwork(o)
		t.Cleanup(n.Close)
		b := &bench{t, Backend{Address: "b:7"}}
		l := b.listen(n.Node("b", secret))
		dialed, err := b.dialWithin(patience, n.Node("a", secret), "b:7")
		b.must(err)
		test(wired{b, n, dialed, b.accept(l)})
	})
}

func (w wired) script(script string) {
	w.Helper()
	w.must(w.Script(script))
}

const header = wire.HeaderSize + wire.TagSize

func TestAFrameTakesTheTimeOfItsLink(t *testing.T) {
	onALink(t, Options{Latency: 10 * time.Millisecond, Bandwidth: 1_000_000}, func(w wired) {
		start := time.Now()
		go w.send(w.a, 1, 0, 500_000-header)
		w.expect(w.b, 1, 0, 500_000-header)
		if took := time.Since(start).Round(time.Microsecond); took != 510*time.Millisecond {
			t.Errorf("500 kB at 1 MB/s and 10 ms of latency took %v", took)
		}
	})
}

func TestConnectionsOfALinkShareItsBandwidth(t *testing.T) {
	onALink(t, Options{Bandwidth: 1_000_000}, func(w wired) {
		l := w.listenAt("b:8")
		second, err := w.dialWithin(patience, w.Node("a", secret), "b:8")
		w.must(err)
		there := w.accept(l)
		start := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() { w.send(w.a, 1, 0, 500_000-header) })
		wg.Go(func() { w.send(second, 2, 0, 500_000-header) })
		wg.Go(func() { w.expect(w.b, 1, 0, 500_000-header) })
		w.expect(there, 2, 0, 500_000-header)
		wg.Wait()
		if took := time.Since(start).Round(time.Microsecond); took != time.Second {
			t.Errorf("twice 500 kB over one link of 1 MB/s took %v", took)
		}
	})
}

func (w wired) listenAt(address string) transport.Listener {
	w.Helper()
	l, err := w.Node("b", secret).Listen(address)
	w.must(err)
	w.Cleanup(func() { l.Close() })
	return l
}

func TestACutEndsTheConnectionBehindItsByte(t *testing.T) {
	onALink(t, Options{Latency: time.Millisecond}, func(w wired) {
		w.script("after 200 a->b cut")
		sent := w.startSending(w.a, buffers(frame(1, 0, 1000)))
		var h wire.Header
		w.must(w.b.ReadHeader(&h))
		w.must(w.b.ReadPayload(make([]byte, 200-header)))
		w.wantError(w.b.ReadPayload(make([]byte, 1)), io.ErrUnexpectedEOF, "a:")
		w.wantError(<-sent, syscall.EPIPE, "b:7")
	})
}

func TestAResetLosesWhatIsOnItsWay(t *testing.T) {
	onALink(t, Options{Latency: time.Second}, func(w wired) {
		w.script("at 500ms a->b reset")
		w.send(w.a, 1, 0, 100)
		_, err := w.receive(w.b)
		w.wantError(err, syscall.ECONNRESET, "a:")
		w.wantError(<-w.startReading(w.a), syscall.ECONNRESET, "b:7")
	})
}

func TestGarbageInsideTheStreamIsFoundOut(t *testing.T) {
	onALink(t, Options{}, func(w wired) {
		w.script("after 180 a->b garbage 32 # behind the first frame")
		w.send(w.a, 1, 0, 100)
		w.send(w.a, 1, 1, 100)
		w.expect(w.b, 1, 0, 100)
		_, err := w.receive(w.b)
		w.wantError(err, transport.ErrIntegrity, "a:")
	})
}

func TestAFrozenLinkFailsOnBothSidesAfterThePeerTimeout(t *testing.T) {
	onALink(t, Options{PeerTimeout: 3 * time.Second}, func(w wired) {
		w.script("after 180 a->b freeze")
		w.send(w.a, 1, 0, 100)
		w.expect(w.b, 1, 0, 100)
		start := time.Now()
		w.send(w.a, 1, 1, 100) // no end is notified
		w.wantError(<-w.startReading(w.b), syscall.ETIMEDOUT, "a:")
		w.wantError(<-w.startReading(w.a), syscall.ETIMEDOUT, "b:7")
		w.wantError(w.a.Send(buffers(frame(1, 2, 100))), syscall.ETIMEDOUT, "b:7")
		if took := time.Since(start); took != stream.Tolerance(3*time.Second) {
			t.Errorf("it took %v", took)
		}
	})
}

func TestAPartitionThatHealsInTimeLosesNothing(t *testing.T) {
	onALink(t, Options{PeerTimeout: 3 * time.Second}, func(w wired) {
		w.script(`
			at 0s a<->b freeze
			at 1.5s a<->b thaw
		`)
		start := time.Now()
		for _, c := range []transport.Conn{w.a, w.b} {
			w.send(c, 1, 0, 100)
		}
		w.expect(w.a, 1, 0, 100)
		w.expect(w.b, 1, 0, 100)
		if took := time.Since(start); took != 1500*time.Millisecond {
			t.Errorf("it took %v", took)
		}
		time.Sleep(10 * time.Second) // the frost that is over must not strike any more
		w.send(w.a, 1, 1, 100)
		w.expect(w.b, 1, 1, 100)
	})
}

func TestDialingAcrossAPartitionSucceedsWhenItHeals(t *testing.T) {
	onALink(t, Options{}, func(w wired) {
		w.script("at 0s b->a freeze\nat 5s b->a thaw")
		l := w.listenAt("b:8")
		start := time.Now()
		c, err := w.dialWithin(patience, w.Node("a", secret), "b:8")
		w.must(err)
		w.accept(l)
		c.Close()
		if took := time.Since(start); took != 5*time.Second {
			t.Errorf("it took %v", took)
		}
		w.script("at 0s a->b freeze")
		_, err = w.dialWithin(time.Second, w.Node("a", secret), "b:8")
		w.wantError(err, context.DeadlineExceeded, "connecting to b:8")
	})
}

func TestASlowReaderHoldsTheSenderBack(t *testing.T) {
	onALink(t, Options{Buffer: 10_000}, func(w wired) {
		w.script("at 0s a->b rate 4000")
		start := time.Now()
		reading := w.startReading(w.b)
		w.send(w.a, 1, 0, 20_000-header)
		if took := time.Since(start); took < 2500*time.Millisecond {
			t.Errorf("20 kB left within %v, where 10 kB fit between and 4 kB are read in a second", took)
		}
		w.a.Close()
		w.wantError(<-reading, io.EOF, "a:")
	})
}

func TestADialerMeetsGarbageOrSilenceAndSaysSo(t *testing.T) {
	for script, want := range map[string]error{
		"after 3 b->a garbage 100": transport.ErrAuth,
		"after 50 a->b freeze":     context.DeadlineExceeded,
	} {
		onALink(t, Options{HandshakeTimeout: time.Second}, func(w wired) {
			l := w.listenAt("b:8")
			w.script(script)
			_, err := w.dialWithin(2*time.Second, w.Node("a", secret), "b:8")
			w.wantError(err, want, "b:8")
			l.Close()
			if _, err := l.Accept(); err == nil {
				t.Errorf("%s: an unauthenticated peer got in", script)
			}
		})
	}
}

func TestAHandshakeThatIsInterruptedIsTriedAgain(t *testing.T) {
	for _, script := range []string{"after 50 a->b reset", "after 50 b->a cut", "after 3 a->b garbage 100"} {
		onALink(t, Options{}, func(w wired) {
			l := w.listenAt("b:8")
			w.script(script)
			_, err := w.dialWithin(patience, w.Node("a", secret), "b:8")
			w.must(err)
			w.accept(l)
		})
	}
}

func TestBadScriptsAreRefusedWithTheLine(t *testing.T) {
	n := NewNetwork(Options{})
	defer n.Close()
	for script, want := range map[string]string{
		"\nafter 10 a->b":               `line 2 of the script, "after 10 a->b": want`,
		"after ten a->b cut":            "invalid syntax",
		"at noon a->b cut":              "invalid duration",
		"on 10 a->b cut":                `"on" is none of at, after and write`,
		"after 10 a-b cut":              `"a-b" is no link`,
		"after 10 a->b explode":         `"explode" is no fault`,
		"after 10 a->b garbage":         "garbage needs 1 numbers, not 0",
		"after 10 a->b cut 3":           "cut needs 0 numbers, not 1",
		"after 10 a->b rate -1 # never": "-1 is negative",
	} {
		if err := n.Script(script); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", script, err, want)
		}
	}
}

func TestAClosedNetworkEndsItsConnections(t *testing.T) {
	onALink(t, Options{}, func(w wired) {
		reading := w.startReading(w.b)
		w.Close()
		if err := <-reading; err == nil {
			t.Error("a read outlived the network")
		}
		if _, err := w.Listen("b", ":0"); !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("listening on a closed network: %v", err)
		}
	})
}

func TestAPeerThatDiesInTheMiddleOfAWriteHarmsNothingElse(t *testing.T) {
	for fault, want := range map[string]error{"cut": io.ErrUnexpectedEOF, "reset": syscall.ECONNRESET, "freeze": syscall.ETIMEDOUT} {
		onALink(t, Options{Latency: time.Millisecond, PeerTimeout: time.Second}, func(w wired) {
			node := w.Node("b", secret)
			registrar, _ := node.(transport.Registrar)
			owner, _ := w.b.(transport.OneSided)
			writer, _ := w.a.(transport.OneSided)
			r, err := registrar.Register(make([]byte, 100_000))
			w.must(err)
			token, err := owner.Grant(r, 10_000, 80_000)
			w.must(err)
			w.script("write 50000 a->b " + fault)
			w.send(w.a, 1, 0, 100) // counts for no write
			w.expect(w.b, 1, 0, 100)
			writing := make(chan error, 1)
			data := content(1, 80_000)
			go func() { writing <- writer.WriteTo(token, 0, net.Buffers{data}) }()
			_, err = w.receive(w.b)
			w.wantError(err, want, "a:")
			<-writing // perhaps before the news came
			if err := w.a.Send(buffers(frame(1, 1, 100))); err == nil {
				t.Errorf("%s: the connection lives on", fault)
			}
			written := 0
			for m := r.Memory()[10_000:]; written < len(data) && m[written] == data[written]; written++ {
				continue
			}
			if written > 50_001 { // a byte of nothing may be right by chance
				t.Errorf("%s: %d bytes arrived, want at most 50000", fault, written)
			}
			clear(r.Memory()[10_000 : 10_000+written])
			w.untouched(r.Memory(), make([]byte, 100_000))
			r.Release()
		})
	}
}
