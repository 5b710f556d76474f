package transporttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/paceline/paceline/transport"
)

var authTests = map[string]func(*bench){
	"AWrongSecretIsRefusedOnBothSides": func(b *bench) {
		l := b.listen(b.node())
		address := l.Addr().String()
		_, err := b.dialWithin(patience, b.New([]byte("another secret"), 0), address)
		b.wantError(err, transport.ErrAuth, address)
		b.wantError(err, transport.ErrAuth, "give every node the same PACELINE_JOB_SECRET or PACELINE_JOB_SECRET_FILE")
		b.admits(l)
	},

	"ANodeWithoutASecretIsRefused": func(b *bench) {
		l := b.listen(b.node())
		_, err := b.dialWithin(patience, b.New(nil, 0), l.Addr().String())
		b.wantError(err, transport.ErrAuth, "no job secret")
		b.admits(l)
	},

	"GarbageIsRefused": func(b *bench) {
		l := b.listen(b.New(secret, soon))
		for _, said := range []string{"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x00", ""} {
			nc, err := b.RawDial(l.Addr().String())
			b.must(err)
			b.guard(nc)
			_, err = nc.Write([]byte(said))
			b.must(err)
			if said == "" {
				nc.Close()
				continue
			}
			io.Copy(io.Discard, nc) // until the listener ends it
		}
		b.admits(l)
	},

	// The silent peers' time is not over before the test's.
	"ManySilentPeersDoNotDelayOthers": func(b *bench) {
		l := b.listen(b.New(secret, time.Hour))
		for range 100 {
			nc, err := b.RawDial(l.Addr().String())
			b.must(err)
			b.guard(nc)
			defer nc.Close()
		}
		b.admits(l)
	},

	// Nothing that is silent goes by itself here: honest peers get in because others make room.
	"AFloodOfSilentPeersKeepsNobodyOut": func(b *bench) {
		const flood, honest = 5000, 8
		l := b.listen(b.New(secret, time.Hour))
		b.flood(l.Addr().String(), flood)
		var wg sync.WaitGroup
		for range honest {
			wg.Go(func() {
				if _, err := b.dial(l.Addr().String()); err != nil {
					b.Error(err)
				}
			})
		}
		for range honest {
			b.accept(l)
		}
		wg.Wait()
	},

	"AListenerThatIsNoPeerIsNamed": func(b *bench) {
		for said, want := range map[string]error{"SSH-2.0-OpenSSH_9.6\r\n": transport.ErrAuth, "": transport.ErrAuth} {
			l, err := b.RawListen()
			b.must(err)
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					nc, err := l.Accept()
					if err != nil {
						return
					}
					nc.Write([]byte(said))
					if said != "" {
						io.Copy(io.Discard, nc)
					}
					nc.Close()
				}
			})
			for d := soon; d < patience && !errors.Is(err, want); d *= 2 { // a crowded machine may not end one attempt before the deadline
				_, err = b.dialWithin(d, b.node(), l.Addr().String())
			}
			b.wantError(err, want, l.Addr().String())
			l.Close()
			wg.Wait()
		}
	},

	"AListenerThatSaysNothingIsGivenUp": func(b *bench) {
		l, err := b.RawListen()
		b.must(err)
		b.Cleanup(func() { l.Close() })
		_, err = b.dialWithin(soon/2, b.node(), l.Addr().String())
		b.wantError(err, context.DeadlineExceeded, l.Addr().String())
	},
}

// admits checks that a peer that knows the secret gets in, and is the next to be accepted.
func (b *bench) admits(l transport.Listener) {
	b.Helper()
	c, err := b.dial(l.Addr().String())
	b.must(err)
	b.send(c, 9, 9, 9)
	b.expect(b.accept(l), 9, 9, 9)
}

// flood makes n connections to an address that say nothing and do not go.
func (b *bench) flood(address string, n int) {
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			nc, err := b.RawDial(address)
			for ; errors.Is(err, syscall.ECONNREFUSED); nc, err = b.RawDial(address) {
				runtime.Gosched() // a network in memory refuses where the backlog is full
			}
			if err != nil {
				b.Error(err)
				return
			}
			b.guard(nc)
		})
	}
	all.Wait()
}

var connectTests = map[string]func(*bench){
	"ManyConnectionsAtOnce": func(b *bench) {
		const conns = 50
		l := b.listen(b.node())
		var wg sync.WaitGroup
		for rank := range conns {
			wg.Go(func() {
				c, err := b.dial(l.Addr().String())
				if err != nil {
					b.Error(err)
					return
				}
				b.send(c, rank, 0, 100)
				b.expect(c, rank, 1, 100)
			})
		}
		for range conns {
			c := b.accept(l)
			h, err := b.receive(c)
			b.must(err)
			b.send(c, int(h.Rank), 1, 100)
		}
		wg.Wait()
	},

	"AClosedListenerAcceptsNoMoreAndItsConnectionsLiveOn": func(b *bench) {
		l := b.listen(b.node())
		x, err := b.dial(l.Addr().String())
		b.must(err)
		y := b.accept(l)
		waiting := make(chan error, 1)
		go func() {
			_, err := l.Accept()
			waiting <- err
		}()
		b.must(l.Close())
		b.must(l.Close())
		b.wantError(<-waiting, net.ErrClosed, "")
		_, err = l.Accept()
		b.wantError(err, net.ErrClosed, "")
		b.send(x, 1, 0, 500)
		b.expect(y, 1, 0, 500)
		b.refused(l.Addr().String())
	},

	"DialingNobodyFailsAtTheDeadlineAndSaysWhy": func(b *bench) {
		l := b.listen(b.node())
		address := l.Addr().String()
		b.must(l.Close())
		start := time.Now()
		b.wantError(b.refused(address), context.DeadlineExceeded, "connecting to "+address)
		if took := time.Since(start); took < soon/2 {
			b.Errorf("gave up after %v", took)
		}
	},

	"DialingCanBeCancelled": func(b *bench) {
		l, err := b.RawListen() // accepts nobody and says nothing
		b.must(err)
		b.Cleanup(func() { l.Close() })
		ctx, cancel := context.WithCancelCause(b.Context())
		why := errors.New("the job is over")
		time.AfterFunc(soon/10, func() { cancel(why) })
		_, err = b.node().Dial(ctx, l.Addr().String())
		b.wantError(err, why, fmt.Sprint(l.Addr()))
	},

	"APeerMayStartLater": func(b *bench) {
		l := b.listen(b.node())
		address := l.Addr().String()
		b.must(l.Close())
		dialed := make(chan error, 1)
		go func() {
			_, err := b.dial(address)
			dialed <- err
		}()
		_, err := b.dialWithin(soon/10, b.node(), address) // time for the other one to be refused, too
		b.wantError(err, context.DeadlineExceeded, address)
		later, err := b.node().Listen(address)
		b.must(err)
		b.Cleanup(func() { later.Close() })
		b.accept(later)
		b.must(<-dialed)
	},

	"AddressesHaveTheKindOfTheTransport": func(b *bench) {
		l := b.listen(b.node())
		x, err := b.dial(l.Addr().String())
		b.must(err)
		kind := b.node().Kind()
		for _, a := range []net.Addr{l.Addr(), x.RemoteAddr(), b.accept(l).RemoteAddr()} {
			if a.Network() != kind {
				b.Errorf("%v is an address of kind %q, want %q", a, a.Network(), kind)
			}
		}
	},

	"AnAddressIsTakenOnce": func(b *bench) {
		l := b.listen(b.node())
		if second, err := b.node().Listen(l.Addr().String()); err == nil {
			second.Close()
			b.Error("two listeners share an address")
		}
	},
}
