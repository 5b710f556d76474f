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

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// A theatre runs the engine of rank 0 of two ranks in virtual time. The test plays the servers and the scheduler, and so decides
// when frames come.

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
		PartitionBytes: partBytes, Fusion: 1 << 10, Credit: 1 << 20, Conns: conns, DeclareTimeout: time.Minute, PeerTimeout: 3 * time.Second, Log: zap.NewNop(),
	}
	if change != nil {
		change(&c)
	}
	th.engine = worker.New(c)
	return th
}

// elastic makes the job of a configuration an elastic one.
func elastic(c *worker.Config) {
	epoch := *c.Membership.Now()
	epoch.Elastic, epoch.Policy = true, "round-robin"
	for i := range epoch.Workers {
		epoch.Workers[i].Incarnation = uint64(i) + 1
	}
	for i := range epoch.Servers {
		epoch.Servers[i].Incarnation = uint64(i) + 11
	}
	c.Membership = membership.NewView(&epoch)
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
		if err := transporttest.Frame(c, func(h *wire.Header, payload []byte) error { each(*h, payload); return nil }); err != nil {
			return err
		}
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

// Whom implements worker.Control.
func (th *theatre) Whom() string { return "the scheduler" }

// RemoveSet implements worker.Control.
func (th *theatre) RemoveSet(context.Context, uint32) error { return nil }

// ReportProfile implements worker.Control.
func (th *theatre) ReportProfile(wire.Profile) {}

// ReportLost implements worker.Control.
func (th *theatre) ReportLost(l wire.Lost) { th.lost <- l }

// sum submits an allreduce of n bytes and gives the error that it ends with.
func (th *theatre) sum(name string, n int) chan error {
	th.t.Helper()
	return th.sumOf(0, name, n)
}

// sumOf is sum in a process set of both ranks.
func (th *theatre) sumOf(set uint32, name string, n int) chan error {
	th.t.Helper()
	done := make(chan error, 1)
	buf := make([]byte, n)
	err := th.engine.Submit([]worker.Op{{
		Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Set: wire.ProcessSet{ID: set, Ranks: []int{0, 1}},
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
