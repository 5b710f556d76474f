package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/scheduler"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/tcp"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var secret = []byte("the job secret of this test")

// site has a test's job: nodes by name, and a scheduler that can be killed and restarted.
type site struct {
	t         *testing.T
	network   *transporttest.Network // nil over TCP
	node      func(name string) transport.Transport
	address   string
	scheduler *scheduler.Scheduler
	served    chan error // the result of its Serve
}

// everywhere runs a test in the twin, in virtual time, and over TCP.
func everywhere(t *testing.T, test func(t *testing.T, s *site)) {
	t.Run("twin", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { inTwin(t, test) })
	})
	t.Run("tcp", func(t *testing.T) {
		s := &site{t: t, node: func(string) transport.Transport { return tcp.New(tcp.Config{Secret: secret}) }, address: "127.0.0.1:0"}
		s.start()
		defer s.kill()
		test(t, s)
	})
}

func inTwin(t *testing.T, test func(t *testing.T, s *site)) {
	network := transporttest.NewNetwork(transporttest.Options{Latency: 100 * time.Microsecond})
	defer network.Close()
	s := &site{t: t, network: network, address: "scheduler:7000"}
	s.node = func(name string) transport.Transport { return network.Node(name, secret) }
	s.start()
	defer s.kill()
	test(t, s)
}

func (s *site) start() {
	s.t.Helper()
	l, err := s.node("scheduler").Listen(s.address)
	if err != nil {
		s.t.Error(err)
		return
	}
	if strings.HasSuffix(s.address, ":0") {
		s.address = l.Addr().String() // the next one listens at the same address
	}
	if s.scheduler, err = scheduler.New(scheduler.Settings{}, nil); err != nil {
		s.t.Error(err)
		return
	}
	s.served = make(chan error, 1)
	go func(sc *scheduler.Scheduler, served chan error) { served <- sc.Serve(l) }(s.scheduler, s.served)
}

func (s *site) kill() {
	s.scheduler.Close()
	if err := <-s.served; err != nil {
		s.t.Errorf("serve: %v", err)
	}
	s.served <- nil // it may be killed again, by the end of the test
}

// dial makes the client of a node, with its losses in a channel.
func (s *site) dial(role wire.Role, rank int, rosters chan<- *membership.Epoch) (*control.Client, chan wire.Lost) {
	s.t.Helper()
	losses := make(chan wire.Lost, 16)
	config := control.Config{
		Transport: s.node(fmt.Sprintf("%s%d", role, rank)), Address: s.address,
		Hello:  wire.Hello{Role: role, Rank: rank},
		OnLost: func(l wire.Lost) { losses <- l },
	}
	if rosters != nil {
		config.OnRoster = func(r *membership.Epoch) { rosters <- r }
	}
	c, err := control.Dial(timeout(s.t), config)
	if err != nil {
		s.t.Fatal(err)
	}
	return c, losses
}

func registerWorker(rank, of int) wire.Register {
	return wire.Register{Workers: of, Node: wire.Node{
		Role: wire.RoleWorker, Rank: rank, Host: "h", PID: 100 + rank, Addresses: address.List{{Kind: "tcp", At: fmt.Sprintf("h:%d", rank)}},
	}}
}

func timeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// together runs f for all ranks concurrently.
func together(n int, f func(rank int)) {
	var all sync.WaitGroup
	for rank := range n {
		all.Go(func() { f(rank) })
	}
	all.Wait()
}

// job is a round with its clients.
type job struct {
	clients []*control.Client
	losses  []chan wire.Lost
	rosters []*membership.Epoch
}

func (s *site) job(n int) *job {
	j := &job{make([]*control.Client, n), make([]chan wire.Lost, n), make([]*membership.Epoch, n)}
	together(n, func(rank int) {
		var err error
		j.clients[rank], j.losses[rank] = s.dial(wire.RoleWorker, rank, nil)
		if j.rosters[rank], err = j.clients[rank].Register(timeout(s.t), registerWorker(rank, n)); err != nil {
			s.t.Error(err)
		}
	})
	if s.t.Failed() {
		s.t.FailNow()
	}
	return j
}

func (j *job) close() { together(len(j.clients), func(r int) { j.clients[r].Close() }) }

func tensorOf(n int, name string, parts ...uint32) wire.Tensor {
	return wire.Tensor{Name: name, Kind: units.Allreduce, Op: units.Sum, DType: units.Float32, Shape: []int64{2},
		Ranks: rankset.Range(n).Ranks(), Prescale: 1, Postscale: 1, Parts: parts}
}

func TestHundredsOfRounds(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		const workers = 4
		rosters := make(chan *membership.Epoch, 1000)
		server, _ := s.dial(wire.RoleServer, 0, rosters)
		defer server.Close()
		serverJoins := make(chan error, 1)
		go func() {
			_, err := server.Register(t.Context(), wire.Register{Node: wire.Node{Role: wire.RoleServer, Host: "h", Addresses: address.List{{Kind: "tcp", At: "h:9"}}}})
			serverJoins <- err
		}()
		seen := map[uint64]bool{}
		for range 200 {
			j := &job{clients: make([]*control.Client, workers), rosters: make([]*membership.Epoch, workers)}
			together(workers, func(rank int) {
				j.clients[rank], _ = s.dial(wire.RoleWorker, rank, nil)
				r := registerWorker(rank, workers)
				r.Dedicated = 1
				var err error
				if j.rosters[rank], err = j.clients[rank].Register(timeout(t), r); err != nil {
					t.Error(err)
				}
				p, err := j.clients[rank].Declare(timeout(t), []wire.Tensor{tensorOf(workers, "x", 8)})
				if err != nil || p[0].ID != 1 {
					t.Errorf("declare: %v, %v", p, err)
				}
				j.clients[rank].Close()
			})
			if t.Failed() {
				t.FailNow()
			}
			round := j.rosters[0].Round
			if pushed := <-rosters; pushed.Round != round || seen[round] || len(pushed.Servers) != workers+1 {
				t.Fatalf("server got round %#x, workers are in %#x", pushed.Round, round)
			}
			seen[round] = true
		}
		if err := <-serverJoins; err != nil {
			t.Fatal(err)
		}
	})
}

func TestRestartInMidRoundIsNotNoticed(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		j := s.job(3)
		defer j.close()
		ctx := timeout(t)
		first, err := j.clients[0].Declare(ctx, []wire.Tensor{tensorOf(3, "a", 8, 8), tensorOf(3, "b", 4)})
		if err != nil {
			t.Fatal(err)
		}
		together(3, func(rank int) {
			if set, err := j.clients[rank].AddSet(ctx, []int{0, 2}); err != nil || set.ID != 1 {
				t.Errorf("add: %v, %v", set, err)
			}
		})
		// Some requests are in flight while the scheduler is down, some are made when it is back.
		s.kill()
		var flying sync.WaitGroup
		placed := make([][]wire.Placed, 3)
		for rank := range 3 {
			flying.Go(func() {
				var err error
				placed[rank], err = j.clients[rank].Declare(ctx, []wire.Tensor{tensorOf(3, "new", 4), tensorOf(3, "a", 8, 8)})
				if err != nil {
					t.Error(err)
				}
				if set, err := j.clients[rank].AddSet(ctx, []int{1}); err != nil || set.ID != 2 {
					t.Errorf("add: %v, %v", set, err)
				}
			})
		}
		s.start()
		flying.Wait()
		for rank := range 3 {
			if got := fmt.Sprint(placed[rank]); got != fmt.Sprint([]wire.Placed{{ID: 3, Servers: placed[0][0].Servers}, first[0]}) {
				t.Errorf("rank %d got %v, first was %v", rank, got, first)
			}
		}
		status, err := j.clients[1].Status(ctx)
		if err != nil || status.State != "running" || status.Tensors != 3 || status.Roster.Round != j.rosters[0].Round {
			t.Fatalf("status %+v, %v", status, err)
		}
	})
}

func TestARestartedSchedulerLearnsMoreThanFitsInOneMessage(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		j := s.job(2)
		defer j.close()
		var all []wire.Tensor
		for i := range 3000 { // about 24 MiB of JSON, by the estimate that splits messages
			all = append(all, tensorOf(2, strings.Repeat("long", 300)+fmt.Sprint(i), 4))
		}
		first, err := j.clients[0].Declare(timeout(t), all)
		if err != nil {
			t.Fatal(err)
		}
		s.kill()
		s.start()
		again, err := j.clients[1].Declare(timeout(t), all)
		if err != nil || fmt.Sprint(again) != fmt.Sprint(first) {
			t.Fatalf("the other rank is told something else (%v)", err)
		}
	})
}

func TestALostWorkerIsToldToAllOthers(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		j := s.job(2)
		defer j.close()
		raw := s.raw(wire.Hello{Role: wire.RoleWorker})
		defer raw.Close()
		third := make(chan *job)
		go func() { third <- s.job(2) }() // another round, whose loss is not reported to the first
		next := <-third
		defer next.close()
		j.clients[0].ReportLost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "connection reset by peer"})
		for rank := range 2 {
			if l := <-j.losses[rank]; l.Rank != 1 || !strings.Contains(l.Why, "reported by rank 0") || l.Round != j.rosters[0].Round {
				t.Errorf("rank %d heard %+v", rank, l)
			}
		}
		if len(next.losses[0])+len(next.losses[1]) != 0 {
			t.Error("a loss was told to another round")
		}
	})
}

// raw is a connection on which a test sends any frames.
func (s *site) raw(hello any) transport.Conn {
	s.t.Helper()
	conn, err := s.node("raw").Dial(timeout(s.t), s.address)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := control.Send(conn, wire.TypeHello, hello); err != nil {
		s.t.Fatal(err)
	}
	return conn
}

func TestAConnectionThatEndsWithoutGoodbyeIsALoss(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		c, losses := s.dial(wire.RoleWorker, 0, nil)
		defer c.Close()
		raw := s.raw(wire.Hello{Role: wire.RoleWorker, Rank: 1})
		r := registerWorker(1, 2)
		r.Node.Session = 77
		if err := control.Send(raw, wire.TypeControl, wire.Control{ID: 1, Register: &r}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Register(timeout(t), registerWorker(0, 2)); err != nil {
			t.Fatal(err)
		}
		raw.Close()
		if l := <-losses; l.Role != wire.RoleWorker || l.Rank != 1 || !strings.Contains(l.Why, "the connection ended without a goodbye") {
			t.Fatalf("heard %+v", l)
		}
	})
}

func TestBadConnectionsAreClosed(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		j := s.job(1)
		defer j.close()
		say := map[string]func() transport.Conn{
			"unknown role":   func() transport.Conn { return s.raw(wire.Hello{Role: "king"}) },
			"hello too long": func() transport.Conn { return s.raw(wire.Hello{Role: wire.Role(strings.Repeat("x", 5000))}) },
			"hello of junk":  func() transport.Conn { return s.raw([]int{1, 2}) },
			"no control": func() transport.Conn {
				c := s.raw(wire.Hello{Role: wire.RoleWorker})
				control.Send(c, wire.TypeHello, wire.Hello{})
				return c
			},
		}
		for name, make := range say {
			conn := make()
			var h wire.Header
			if err := conn.ReadHeader(&h); err == nil {
				t.Errorf("%s: got a %v", name, h.Type)
			}
			conn.Close()
		}
		if _, err := j.clients[0].Status(timeout(t)); err != nil {
			t.Fatalf("the others are harmed: %v", err)
		}
	})
}

func TestErrorsNameTheRequestAndTheScheduler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // deadlines, of which a crowded machine would take its part
		inTwin(t, func(t *testing.T, s *site) {
			c, _ := s.dial(wire.RoleWorker, 0, nil)
			defer c.Close()
			within := func(d time.Duration) context.Context {
				ctx, cancel := context.WithTimeout(t.Context(), d)
				t.Cleanup(cancel)
				return ctx
			}
			wants := func(err error, parts ...string) {
				t.Helper()
				for _, p := range append(parts, s.address) {
					if err == nil || !strings.Contains(err.Error(), p) {
						t.Errorf("error %q should say %q", err, p)
					}
				}
			}
			_, err := c.Register(within(2*time.Second), registerWorker(0, 3))
			wants(err, "register: waited", "s for ranks 1, 2 of 3")
			var refused *control.RefusedError
			if !errors.As(err, &refused) {
				t.Errorf("%v is no refusal", err)
			}
			_, err = c.Declare(timeout(t), []wire.Tensor{tensorOf(1, "x", 4), tensorOf(1, "y", 4)})
			wants(err, `declare "x" and 1 more: only a worker`)
			s.kill()
			_, err = c.Status(within(500 * time.Millisecond))
			wants(err, "status: waited", "no line for")
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v is no deadline", err)
			}
			c.Close()
			if _, err = c.Status(within(500 * time.Millisecond)); !errors.Is(err, control.ErrClosed) {
				t.Errorf("after close: %v", err)
			}
		})
	})
}

func TestANodeThatIsStoppedForLongIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inTwin(t, func(t *testing.T, s *site) {
			j := s.job(2)
			defer j.close()
			start := time.Now()
			if err := s.network.Script("at 0s worker1 stop\nat 5s worker1 continue\nat 20s worker1 stop"); err != nil {
				t.Fatal(err)
			}
			l := <-j.losses[0]
			if took := time.Since(start); l.Rank != 1 || took < 25*time.Second || took > 30*time.Second {
				t.Errorf("heard %+v after %v", l, took)
			}
			if err := s.network.Script("at 0s worker1 continue"); err != nil {
				t.Fatal(err)
			}
		})
	})
}

func TestANodeThatDoesNotReadIsDropped(t *testing.T) {
	everywhere(t, func(t *testing.T, s *site) {
		raw := s.raw(wire.Hello{Role: wire.RoleObserver})
		defer raw.Close()
		for i := range 1 << 20 {
			ask := wire.Control{ID: uint64(i + 1), Status: &wire.StatusReply{State: strings.Repeat("x", 64)}}
			if control.Send(raw, wire.TypeControl, ask) != nil {
				return // dropped
			}
		}
		t.Fatal("a million answers wait for a node that does not read")
	})
}
