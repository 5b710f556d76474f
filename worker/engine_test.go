package worker_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// The tests in this file run the engine of rank 0 of two ranks in virtual time. The test plays the servers and the
// scheduler, and so decides when frames come.

const partBytes = 64 << 10

// theatre is an engine with servers that the test plays.
type theatre struct {
	t       *testing.T
	engine  *worker.Engine
	servers []*playedServer
	ids     uint32
	lost    chan wire.Lost
}

// playedServer is one server: conns are the engine's connections to it, greeted.
type playedServer struct {
	t     *testing.T
	hello wire.Hello
	conns []transport.Conn
}

// perform runs a test on an engine with a number of dedicated servers and of connections to each.
func perform(t *testing.T, servers, conns int, change func(*worker.Config), test func(*theatre)) {
	synctest.Test(t, func(t *testing.T) {
		n := transporttest.NewNetwork(transporttest.Options{})
		defer n.Close()
		th := newTheatre(t, n, servers, conns, change)
		if err := th.start(n); err != nil {
			t.Fatal(err)
		}
		test(th)
		for _, s := range th.servers {
			s.leave()
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		th.engine.Shutdown(ctx)
	})
}

func newTheatre(t *testing.T, n *transporttest.Network, servers, conns int, change func(*worker.Config)) *theatre {
	th := &theatre{t: t, lost: make(chan wire.Lost, 16)}
	epoch := &membership.Epoch{Round: 1, Workers: make([]membership.Worker, 2)}
	for i := range servers {
		epoch.Servers = append(epoch.Servers, membership.Server{Rank: membership.Dedicated, Node: membership.Node{Addresses: address.List{{Kind: "twin", At: fmt.Sprintf("server%d:1", i)}}}})
		th.servers = append(th.servers, &playedServer{t: t})
	}
	c := worker.Config{
		Membership: membership.NewView(epoch), Transports: transport.NewSet(nil, n.Node("worker0", []byte("secret"))), Control: th,
		PartitionBytes: partBytes, Fusion: 1 << 10, Credit: 1 << 20, Conns: conns, DeclareTimeout: time.Minute, Log: zap.NewNop(),
	}
	if change != nil {
		change(&c)
	}
	th.engine = worker.New(c)
	return th
}

// start has every server accept the engine's connections.
func (th *theatre) start(n *transporttest.Network) error {
	ctx, cancel := context.WithTimeout(th.t.Context(), time.Minute)
	defer cancel()
	var listeners []transport.Listener
	defer func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	}()
	for i, s := range th.servers {
		l, err := n.Node(fmt.Sprintf("server%d", i), []byte("secret")).Listen(fmt.Sprintf("server%d:1", i))
		if err != nil {
			return err
		}
		th.t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				s.conns = append(s.conns, c)
				s.greet(c)
			}
		}()
		listeners = append(listeners, l)
	}
	err := th.engine.Start(ctx, nil)
	synctest.Wait()
	return err
}

func (s *playedServer) greet(c transport.Conn) {
	var h wire.Header
	if err := c.ReadHeader(&h); err != nil {
		return
	}
	hello := make([]byte, h.Length)
	_ = c.ReadPayload(hello)
	_ = wire.DecodeJSON(h.Type, hello, &s.hello)
	s.send(c, wire.Header{Type: wire.TypeWelcome}, nil)
}

func (s *playedServer) send(c transport.Conn, h wire.Header, payload []byte) {
	_ = c.Send(net.Buffers{wire.AppendFrame(nil, h, payload)})
}

// frames reads the frames of a connection, those in batches one by one, until it ends.
func (s *playedServer) frames(c transport.Conn, each func(h wire.Header, payload []byte)) error {
	for {
		var h wire.Header
		if err := c.ReadHeader(&h); err != nil {
			return err
		}
		if h.Type == wire.TypeBatch {
			batch, err := transport.ReadBatch(c, &h, nil)
			if err == nil {
				err = batch.Frames(func(h *wire.Header, payload []byte) error { each(*h, payload); return nil })
			}
			if err != nil {
				return err
			}
			continue
		}
		payload, err := transporttest.Payload(c, &h)
		if err != nil {
			return err
		}
		each(h, payload)
	}
}

func (s *playedServer) leave() {
	for _, c := range s.conns {
		_ = c.Close()
	}
}

// Declare implements worker.Control: partitions are placed round-robin.
func (th *theatre) Declare(_ context.Context, tensors []wire.Tensor) ([]wire.Placed, error) {
	placed := make([]wire.Placed, len(tensors))
	for i := range tensors {
		th.ids++
		placed[i].ID = th.ids
		for part := range tensors[i].Parts {
			placed[i].Servers = append(placed[i].Servers, part%len(th.servers))
		}
	}
	return placed, nil
}

// Clock implements worker.Control.
func (th *theatre) Clock() (ahead, uncertain time.Duration, known bool) {
	return time.Second, time.Millisecond, true
}

// ReportLost implements worker.Control.
func (th *theatre) ReportLost(l wire.Lost) { th.lost <- l }

// sum submits an allreduce of n bytes and gives the error that it ends with.
func (th *theatre) sum(name string, n int) chan error {
	th.t.Helper()
	done := make(chan error, 1)
	buf := make([]byte, n)
	err := th.engine.Submit([]worker.Op{{
		Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}},
		Shape: []int64{int64(n)}, Input: buf, Output: buf, Prescale: 1, Postscale: 1, Name: name,
		Done: func(_ worker.Output, err error) { done <- err },
	}})
	if err != nil {
		th.t.Fatal(err)
	}
	return done
}

// wantEnd checks that the operation ends in time, with an error of a kind whose text has all these parts.
func (th *theatre) wantEnd(done chan error, kind error, says ...string) {
	th.t.Helper()
	select {
	case err := <-done:
		if !errors.Is(err, kind) {
			th.t.Errorf("got %v, want %v", err, kind)
			return
		}
		for _, text := range says {
			if !strings.Contains(err.Error(), text) {
				th.t.Errorf("got %q, want it to say %q", err, text)
			}
		}
	case <-time.After(time.Minute):
		th.t.Errorf("the operation has not ended after a minute, want %v", kind)
	}
}

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
		th.wantEnd(done, worker.ErrUnsupported, "server 0", "has shut down")
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
		th.servers = th.servers[:1] // nobody listens at the other's address yet
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

// Scales must be finite numbers.
func TestScalesMustBeFinite(t *testing.T) {
	perform(t, 1, 1, nil, func(th *theatre) {
		for _, scales := range [][2]float64{{math.NaN(), 1}, {1, math.NaN()}, {math.Inf(1), 1}, {0, math.Inf(-1)}} {
			op := worker.Op{Kind: units.Allreduce, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Name: "x", Prescale: scales[0], Postscale: scales[1]}
			op.Shape, op.Input, op.Output = []int64{1}, []byte{1}, []byte{1}
			if err := th.engine.Submit([]worker.Op{op}); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "must be finite numbers") {
				th.t.Errorf("scales %v: %v", scales, err)
			}
		}
	})
}

// A server reports the consumed bytes of each connection on its own. Bytes that it has not reported yet hold credit;
// over all connections they must leave some, or nothing would be sent any more.
func TestUnreportedBytesLeaveCreditHoweverManyConnections(t *testing.T) {
	for _, conns := range []int{1, 2, 8, 64} {
		const credit = 64 << 10
		perform(t, 1, conns, func(c *worker.Config) { c.Credit = credit }, func(th *theatre) {
			if held := th.servers[0].hello.Window * uint64(conns); held == 0 || held > credit/2 {
				th.t.Errorf("%d connections may hold %d of %d bytes of credit", conns, held, credit)
			}
		})
	}
}

// The caller gets the memory that the engine has allocated for a result, also with an error.
func TestFailedAllgatherHandsItsMemoryOver(t *testing.T) {
	perform(t, 1, 1, nil, func(th *theatre) {
		s := th.servers[0]
		go func() {
			_ = s.frames(s.conns[0], func(h wire.Header, _ []byte) {
				switch h.Type {
				case wire.TypePush: // the numbers of rows
					h.Type, h.Flags = wire.TypeResult, 0
					s.send(s.conns[0], h, binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(nil, 3), 4))
				case wire.TypeGet:
					_ = s.conns[0].Close()
				}
			})
		}()
		type result struct {
			out worker.Output
			err error
		}
		done := make(chan result, 1)
		err := th.engine.Submit([]worker.Op{{
			Kind: units.Allgather, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{3}, Input: make([]byte, 3),
			Prescale: 1, Postscale: 1, Name: "x", Done: func(out worker.Output, err error) { done <- result{out, err} },
		}})
		if err != nil {
			th.t.Fatal(err)
		}
		if r := <-done; !errors.Is(r.err, worker.ErrPeerLost) || len(r.out.Data) != 7 {
			th.t.Errorf("got %d bytes and %v, want the 7 that were taken and the loss", len(r.out.Data), r.err)
		}
	})
}

// The end of a superstep is decided before this rank's first frames of the values have left: its reports reach no server
// before the announcement of their value.
func TestReportOfASuperstepFollowsTheAnnouncement(t *testing.T) {
	perform(t, 2, 2, func(c *worker.Config) { c.Credit = 1 }, func(th *theatre) {
		th.sum("before", 2*partBytes) // takes the credit of both servers
		done := make(chan error, 2)
		ops := make([]worker.Op, 2)
		for i := range ops {
			ops[i] = worker.Op{
				Kind: units.Accumulate, DType: units.Float32, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}},
				Root: 1, Shape: []int64{2 * partBytes / 4}, Output: make([]byte, 2*partBytes), Prescale: 1, Postscale: 1,
				Name:     fmt.Sprint("value", i),
				Declared: options.Declared{Sync: options.Sync{Model: "adaptive:1,1"}}, Held: worker.Held{Use: units.Declare, Group: "value0"},
				Done: func(_ worker.Output, err error) { done <- err },
			}
		}
		if err := th.engine.Submit(ops); err != nil {
			th.t.Fatal(err)
		}
		synctest.Wait()
		leader := th.ids - 1
		th.servers[0].send(th.servers[0].conns[0], wire.Header{Type: wire.TypeStop, Tensor: leader}, wire.Stop{Last: 1}.Append(nil))
		reports := make(chan wire.Header, 16)
		for _, s := range th.servers {
			for _, c := range s.conns {
				announced := map[uint32]bool{}
				go func() {
					_ = s.frames(c, func(h wire.Header, _ []byte) {
						switch h.Type {
						case wire.TypeAnnounce:
							announced[h.Tensor] = true
						case wire.TypeReport:
							if !announced[h.Tensor] {
								th.t.Errorf("report of tensor %d before its announcement", h.Tensor)
							}
							reports <- h
						}
					})
				}()
			}
		}
		for range 2 * len(th.servers) {
			select {
			case <-reports:
			case <-time.After(time.Minute):
				th.t.Error("a server has no report of a value that it holds")
			}
		}
	})
}

// silence is a scheduler that does not answer.
type silence struct{ worker.Control }

func (silence) Declare(ctx context.Context, _ []wire.Tensor) ([]wire.Placed, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A caller must be able to tell the failure of the operation from the end of a wait.
func TestDeclarationWithoutAnAnswerIsAStall(t *testing.T) {
	perform(t, 1, 1, func(c *worker.Config) { c.Control = silence{c.Control} }, func(th *theatre) {
		err := <-th.sum("new", 8)
		if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), `"new" could not be declared`) {
			t.Error(err)
		}
	})
}

// A source's put of a partition away from home asks for no answer. Where the server refuses it for its epoch, the operation
// ends with an error while it waits for its home, and one that has ended is in the log.
func TestARefusedFrameWithoutAnAnswerEndsItsOperation(t *testing.T) {
	core, logged := observer.New(zap.WarnLevel)
	perform(t, 1, 1, func(c *worker.Config) { c.Log = zap.New(core) }, func(th *theatre) {
		s := th.servers[0]
		done := make(chan error, 1)
		buf := make([]byte, 2*partBytes)
		err := th.engine.Submit([]worker.Op{{
			Kind: units.Broadcast, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{2 * partBytes}, Input: buf, Output: buf,
			Prescale: 1, Postscale: 1, Name: "b", Done: func(_ worker.Output, err error) { done <- err },
		}})
		if err != nil {
			t.Fatal(err)
		}
		refused := make(chan wire.Header, 1)
		go func() {
			_ = s.frames(s.conns[0], func(h wire.Header, _ []byte) {
				if h.Type == wire.TypePut && h.Flags&wire.FlagHome == 0 {
					h.Type, h.Epoch, h.Length = wire.TypeEpoch, 5, 0
					s.send(s.conns[0], h, nil)
					refused <- h
				}
			})
		}()
		th.wantEnd(done, worker.ErrUnsupported, `"b"`, "is in epoch 5")
		s.send(s.conns[0], <-refused, nil)
		synctest.Wait()
	})
	if n := logged.FilterMessageSnippet("refused what this rank sent").Len(); n != 1 {
		t.Errorf("%d lines are logged of what was refused when its operation had ended: %v", n, logged.All())
	}
}

// Operations without a name are one name's: some are under way, the rest wait in their order, so that a server holds no more
// for a rank that is ahead of the others. All of them end, also where the engine does before.
func TestOperationsFarAheadWaitInTheWorker(t *testing.T) {
	const all = 2*limits.MaxAhead + 100
	for _, answered := range []int{all, 10} {
		perform(t, 1, 1, nil, func(th *theatre) {
			s := th.servers[0]
			var pushed atomic.Int64
			go func() {
				_ = s.frames(s.conns[0], func(h wire.Header, payload []byte) {
					if h.Type != wire.TypePush {
						return
					}
					pushed.Add(1)
					if h.Iteration < uint64(answered) {
						h.Type, h.Flags = wire.TypeResult, 0
						s.send(s.conns[0], h, payload)
					}
				})
			}()
			var ends []chan error
			for range all {
				ends = append(ends, th.sum("", 8))
			}
			th.engine.Flush(true)
			synctest.Wait()
			if answered < all && pushed.Load() != int64(answered)+limits.MaxAhead {
				t.Errorf("%d are pushed beside %d answers", pushed.Load(), answered)
			}
			if answered < all {
				th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "a test"})
			}
			for i, end := range ends {
				want := error(nil)
				if i >= answered {
					want = worker.ErrPeerLost
				}
				th.wantEnd(end, want)
			}
		})
	}
}
