package worker_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// A server's connection breaks while partitions are being sent to it and answers are awaited from
// another: the operation ends all the same.
func TestConnectionBrokenInMidSendEndsEveryOperation(t *testing.T) {
	perform(t, 2, 1, nil, func(th *theatre) {
		done := th.sum("x", 8*partBytes)
		synctest.Wait() // nobody reads: both connections are full
		_ = th.servers[0].conns[0].Close()
		th.wantEnd(done, worker.ErrPeerLost, `"x"`, "rank 0", "server 0")
	})
}

// A worker that shuts down keeps its connections until the servers have closed them: they may still read frames from
// before its goodbye, and answer.
func TestShutdownLeavesClosingToTheServers(t *testing.T) {
	perform(t, 2, 2, nil, func(th *theatre) {
		for _, s := range th.servers {
			for _, c := range s.conns {
				go func() {
					err := s.frames(c, func(h wire.Header, _ []byte) {
						if h.Type != wire.TypeBye {
							return
						}
						time.Sleep(time.Second)
						for range 1000 {
							if err := c.Send(net.Buffers{wire.AppendFrame(nil, wire.Header{Type: wire.TypeWindow}, wire.Window{}.Append(nil))}); err != nil {
								th.t.Errorf("after the goodbye: %v", err)
								return
							}
						}
						_ = c.Close()
					})
					if !errors.Is(err, net.ErrClosed) {
						th.t.Errorf("the engine's end: %v", err)
					}
				}()
			}
		}
		ctx, cancel := context.WithTimeout(th.t.Context(), time.Minute)
		defer cancel()
		start := time.Now()
		th.engine.Shutdown(ctx)
		if took := time.Since(start); took > 2*time.Second {
			th.t.Errorf("the shutdown took %v", took)
		}
	})
}

// A server that says goodbye and closes fails what waits for it, not the round, also where a frame to it is
// refused before its goodbye has been read.
func TestServerThatHasLeftEndsJoinsAndOperationsOnly(t *testing.T) {
	perform(t, 2, 1, nil, func(th *theatre) {
		done := th.sum("x", 2*partBytes)
		joined := make(chan error, 1)
		if err := th.engine.Join(func(_ worker.Output, err error) { joined <- err }); err != nil {
			th.t.Fatal(err)
		}
		go func() { _ = th.servers[1].frames(th.servers[1].conns[0], func(wire.Header, []byte) {}) }()
		s := th.servers[0]
		s.send(s.conns[0], wire.Header{Type: wire.TypeBye}, nil)
		_ = s.conns[0].Close()
		th.wantEnd(done, worker.ErrUnsupported, "server 0 (on host", "has shut down")
		th.wantEnd(joined, worker.ErrUnsupported, "join on rank 0", "server 0", "has shut down")
		th.wantEnd(th.sum("y", 2*partBytes), worker.ErrUnsupported, "server 0", "has shut down")
		if err := th.engine.Err(); err != nil {
			th.t.Errorf("the engine is broken: %v", err)
		}
	})
}

// A peer is lost while the engine connects: Start ends at once, says so and leaves nothing open.
func TestPeerLostWhileTheEngineConnects(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := transporttest.NewNetwork(transporttest.Options{})
		defer n.Close()
		th := newTheatre(t, n, 2, 2, nil)
		silent := th.servers[1]
		th.servers = th.servers[:1]
		if err := n.Script("at 0s worker0<->server1 freeze"); err != nil { // the other one does not answer
			t.Fatal(err)
		}
		go func() {
			time.Sleep(time.Second)
			th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "it was killed"})
		}()
		start := time.Now()
		err := th.start(n)
		if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "it was killed") {
			t.Errorf("start: %v", err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		silent.leave()
		th.servers[0].leave()
		th.engine.Shutdown(t.Context())
	})
}

// A server of an elastic job is lost before the engine has reached it: the engine starts without it as soon as it hears so.
func TestAServerThatIsLostMeanwhileIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := transporttest.NewNetwork(transporttest.Options{})
		defer n.Close()
		var members *membership.View
		th := newTheatre(t, n, 2, 2, func(c *worker.Config) {
			elastic(c)
			members = c.Membership
		})
		th.servers = th.servers[:1]
		if err := n.Script("at 0s worker0<->server1 freeze"); err != nil { // the other one does not answer
			t.Fatal(err)
		}
		go func() {
			time.Sleep(time.Second) // of virtual time: the engine connects
			gone := membership.Member{Role: membership.ServerRole, Number: 1}
			later, err := members.Now().Next(membership.Change{Lose: []membership.Loss{{Member: gone, Why: "its process has ended"}}})
			if err != nil {
				t.Error(err)
				return
			}
			th.engine.Follow(later)
		}()
		start := time.Now()
		if err := th.start(n); err != nil {
			t.Errorf("start: %v", err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("it took %v", took)
		}
		th.servers[0].leave()
		th.engine.Shutdown(t.Context())
	})
}

// A server joins an elastic job and ends before the engine has reached it. Its host refuses the connection: the scheduler hears that at once, and need not wait
// until the server may have come back.
func TestAServerThatHasJoinedAndEndedIsReportedAtOnce(t *testing.T) {
	var members *membership.View
	change := func(c *worker.Config) {
		elastic(c)
		members = c.Membership
	}
	perform(t, 1, 1, change, func(th *theatre) {
		start := time.Now()
		later, err := members.Now().Next(membership.Change{Servers: []membership.Node{{Incarnation: 20, Addresses: address.List{{Kind: "twin", At: "server1:1"}}}}})
		if err != nil {
			t.Fatal(err)
		}
		th.engine.Follow(later)
		select {
		case l := <-th.lost:
			if took := time.Since(start); l.Role != wire.RoleServer || l.Rank != 1 || !strings.Contains(l.Why, "connection refused") || took > time.Second {
				t.Errorf("reported %+v after %v", l, took)
			}
		case <-time.After(time.Minute):
			t.Error("nothing was reported")
		}
	})
}

// A server cannot be reached: the others hear of that server on every connection, also on one that is being opened. They
// must not take the end of this rank for the fault.
func TestServersHearWhichServerCouldNotBeReached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := transporttest.NewNetwork(transporttest.Options{})
		defer n.Close()
		th := newTheatre(t, n, 2, 2, nil)
		bad := th.servers[1]
		heard := make(chan string, 3)
		for i, s := range th.servers {
			l, err := n.Node(fmt.Sprintf("server%d", i), []byte("secret")).Listen(fmt.Sprintf("server%d:1", i))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { l.Close() })
			go func() {
				for conn := range 2 {
					c, err := l.Accept()
					if err != nil {
						return
					}
					if s == bad {
						time.Sleep(time.Second) // of virtual time: the other server's connections are open, or being opened
						_ = c.Close()
						return
					}
					if conn == 0 {
						s.greet(c)
					}
					go func() {
						defer c.Close()
						_ = s.frames(c, func(h wire.Header, payload []byte) { heard <- fmt.Sprintf("%v %s", h.Type, payload) })
					}()
				}
			}()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err := th.engine.Start(ctx, nil)
		if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "is gone: rank 0 cannot reach server 1") {
			t.Errorf("start: %v", err)
		}
		synctest.Wait()
		var losses int
		for range len(heard) {
			if frame := <-heard; strings.HasPrefix(frame, "lost") && strings.Contains(frame, `"role":"server","rank":1`) {
				losses++
			} else if !strings.HasPrefix(frame, "hello") {
				t.Errorf("server 0 hears: %s", frame)
			}
		}
		if losses != 2 || len(th.lost) != 1 {
			t.Errorf("server 0 hears of %d losses, the scheduler of %d", losses, len(th.lost))
		}
		th.engine.Shutdown(t.Context())
	})
}

// A server whose round has ended says why in place of a welcome.
func TestALossInPlaceOfAWelcomeIsTheReason(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := transporttest.NewNetwork(transporttest.Options{})
		defer n.Close()
		th := newTheatre(t, n, 1, 1, nil)
		l, err := n.Node("server0", []byte("secret")).Listen("server0:1")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			if c, err := l.Accept(); err == nil {
				s := th.servers[0]
				_, _ = control.ReadHello(c)
				s.send(c, wire.Header{Type: wire.TypeLost}, []byte(`{"role":"worker","rank":1,"why":"it was killed"}`))
				_ = c.Close()
			}
		}()
		if err := th.engine.Start(t.Context(), nil); !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "is gone: it was killed") {
			t.Errorf("start: %v", err)
		}
		th.engine.Shutdown(t.Context())
	})
}

func TestPeerLostBeforeTheEngineStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := transporttest.NewNetwork(transporttest.Options{})
		defer n.Close()
		th := newTheatre(t, n, 1, 1, nil)
		th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "it was killed"})
		if err := th.start(n); !errors.Is(err, worker.ErrPeerLost) {
			t.Errorf("start: %v", err)
		}
		th.engine.Shutdown(t.Context())
	})
}
