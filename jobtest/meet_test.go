package jobtest_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/internal/version"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

var (
	rollings    = flag.Int("rollings", seeds(8), "how many seeds TestServersAreReplacedWhileTrainingRuns runs")
	rollingSeed = flag.Uint64("rolling", 0, "the first of them: a seed that failed")
)

// TestServersAreReplacedWhileTrainingRuns plays jobs that servers join at any time while others leave, until none is left of those that the job began with. No operation fails, and all give what they give without that, bit for bit.
func TestServersAreReplacedWhileTrainingRuns(t *testing.T) {
	for seed := *rollingSeed; seed < *rollingSeed+uint64(*rollings); seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { playRolling(t, seed) })
			if t.Failed() {
				t.Logf("again: go test -tags invariants ./jobtest -run TestServersAreReplacedWhile -rolling %d -rollings 1", seed)
			}
		})
	}
}

// TestAServerThatIsLostAsItJoinsHoldsNobody: no rank reaches it before the others hear that it has gone.
func TestAServerThatIsLostAsItJoinsHoldsNobody(t *testing.T) {
	j, line := joinsUnreached(t)
	line.Close()
	j.Works("x", 100000)
	j.Works("y", 100000)
}

// TestAServerThatNobodyReachesAsItJoinsHoldsUpTheJobForThePeerTimeout, and little more: to the scheduler it is there.
func TestAServerThatNobodyReachesAsItJoinsHoldsUpTheJobForThePeerTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 3 * time.Second
		j, network := apartOn(t, 2, jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) { s.StartTimeout, s.PeerTimeout = time.Hour, timeout }))
		j.Start()
		j.Works("x", 100000)
		for rank := range 2 {
			if err := network.Script(fmt.Sprintf("at 0s %s<->%s freeze", nodeName(rank), serverName(1))); err != nil {
				t.Fatal(err)
			}
		}
		j.StartServer()
		time.Sleep(time.Second) // of virtual time: it has joined
		began := time.Now()
		for i := range 8 { // some on the new server
			j.Works(fmt.Sprint("new ", i), 100000)
		}
		j.Works("x", 100000)
		if took := time.Since(began); took > 3*timeout {
			t.Errorf("it took %v", took)
		}
	})
}

// TestConditionsAreChangedOnlyWhereEveryServerIsReached: one that has joined is waited for until the deadline.
func TestConditionsAreChangedOnlyWhereEveryServerIsReached(t *testing.T) {
	j, line := joinsUnreached(t)
	w := wire.Condition{Names: []string{"x"}, Pull: "bsp"}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := j.Workers[0].Engine.SetCondition(ctx, nil, w); !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), "server 1") {
		t.Errorf("%v, want an error that names the server", err)
	}
	if _, err := j.Workers[0].Engine.SetCondition(t.Context(), []int{0}, w); err != nil {
		t.Errorf("of another server: %v", err)
	}
	line.Close()
	j.Works("y", 100000)
	if _, err := j.Workers[0].Engine.SetCondition(t.Context(), nil, w); err != nil {
		t.Error(err)
	}
	j.Works("x", 100000)
}

// TestAnEngineEndsAtOnceThoughItDeclaresWhileAServerJoins: operations fail when the reason is there, and not when the server was to be reached at the latest.
func TestAnEngineEndsAtOnceThoughItDeclaresWhileAServerJoins(t *testing.T) {
	j, line := joinsUnreached(t)
	defer line.Close()
	results, err := j.Submit(0, jobtest.Float32s(units.Allreduce, "new", 1000))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond) // the scheduler answers meanwhile
	j.Workers[0].Engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "of this test"})
	if _, err := jobtest.Await(results[0], 0, "new"); !errors.Is(err, worker.ErrPeerLost) {
		t.Error(err)
	}
}

// joinsUnreached is a job of two ranks and a server that another one has joined, which accepts connections and says nothing. It is lost when its line to the scheduler ends.
func joinsUnreached(t *testing.T) (*jobtest.Job, *control.Client) {
	j := jobtest.Start(t, 2, jobtest.Dedicated(1), jobtest.Elastic, jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.StartTimeout = 2 * jobtest.Hang }))
	j.Works("x", 100000)
	line, err := control.Dial(t.Context(), control.Config{Transport: j.Transports().Required(), Address: j.Settings.Scheduler, Hello: wire.Hello{Role: wire.RoleServer}})
	if err != nil {
		t.Fatal(err)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	if err := silent.(*net.TCPListener).SetDeadline(time.Now().Add(jobtest.Hang)); err != nil {
		t.Fatal(err)
	}
	me := wire.Node{Role: wire.RoleServer, Host: "lost", Version: version.String(), Addresses: address.List{{Kind: "tcp", At: silent.Addr().String()}}}
	if _, err := line.Register(t.Context(), wire.Register{Node: me, Elastic: true, Alike: j.Settings.Alike()}); err != nil {
		t.Fatal(err)
	}
	for range j.Workers { // each has begun to connect
		if _, err := silent.Accept(); err != nil {
			t.Fatal(err)
		}
	}
	return j, line
}

// asOneJoins plays a job many times, each time a little later after the start of a third server.
func asOneJoins(t *testing.T, times int, step time.Duration, play func(t *testing.T, j *jobtest.Job, since time.Duration)) {
	for i := range times {
		synctest.Test(t, func(t *testing.T) {
			j := apart(t, 3, 2, jobtest.With(func(s *settings.Settings) { s.Connections = 3 }))
			j.Start()
			j.Works("x", 100000)
			j.StartServer()
			since := time.Duration(i) * step
			time.Sleep(since) // of virtual time
			play(t, j, since)
		})
	}
}

// TestAServerThatLeavesAsItJoinsHoldsNobody: ranks have some of their connections to it, which nobody reads.
func TestAServerThatLeavesAsItJoinsHoldsNobody(t *testing.T) {
	asOneJoins(t, 12, 2*time.Millisecond, func(_ *testing.T, j *jobtest.Job, _ time.Duration) {
		j.StopServer(2)
		j.Works("x", 100000)
		j.StopServer(0)
		j.Works("x", 100000)
	})
}

// TestRanksThatLeaveAsAServerJoinsSayGoodbyeToIt: they do not leave while they connect to it, which would hold up their own end and be a loss to it.
func TestRanksThatLeaveAsAServerJoinsSayGoodbyeToIt(t *testing.T) {
	asOneJoins(t, 100, 500*time.Microsecond, func(t *testing.T, j *jobtest.Job, since time.Duration) {
		start := time.Now()
		j.Shutdown()
		if took := time.Since(start); took > time.Second {
			t.Errorf("left %v after the start of a server: it took %v", since, took)
		}
	})
}

func playRolling(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 16))
	ranks, servers, more := 2+random.IntN(3), 1+random.IntN(3), 1+random.IntN(3)
	m := jobtest.NewMeans(random, ranks, 1+random.IntN(50000), 60, servers)
	m.Lost, m.Heirs, m.Codec = nil, true, []string{"", "topk:0.1"}[random.IntN(2)]
	j, _ := lendingOn(t, ranks, seed%2 == 1, jobtest.Dedicated(servers))
	j.Settings.Connections = 1 + random.IntN(2)
	j.Start()
	pauses := make([]time.Duration, servers+more)
	for i := range pauses {
		pauses[i] = time.Duration(random.IntN(300)) * time.Millisecond
	}
	var moving sync.WaitGroup
	moving.Go(func() { // in virtual time
		for i := range max(servers, more) {
			if i < more {
				time.Sleep(pauses[i])
				j.StartServer()
			}
			if i < servers {
				time.Sleep(pauses[more+i])
				if i == servers-1 {
					time.Sleep(20 * time.Millisecond) // another has joined: a job ends with its last server
				}
				j.StopServer(i)
			}
		}
	})
	errs := j.Outcomes(func(rank int) error {
		others := make(chan error)
		go func() { others <- exchanges(j, rank, 25) }()
		err := m.Train(j, rank)
		if other := <-others; err == nil {
			err = other
		}
		if err == nil { // new names, on whatever server there is by then
			moving.Wait()
			for i := range 8 {
				if err := j.Sums(rank, fmt.Sprint("new ", i), 3000); err != nil {
					return err
				}
			}
		}
		return err
	})
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d of %d, with %d servers and %d more: %v", rank, ranks, servers, more, err)
		}
	}
	if t.Failed() {
		return
	}
	if err := m.Check(); err != nil {
		t.Errorf("%d ranks, %d servers and %d more: %v", ranks, servers, more, err)
	}
}

// TestAJoinEndsWhereAServerHasComeInTheMiddleOfIt: a server that has never heard of the ranks that have joined, in Horovod's sense, holds up nobody, and serves what
// comes behind.
func TestAJoinEndsWhereAServerHasComeInTheMiddleOfIt(t *testing.T) {
	for _, before := range []int{0, 1} { // joins of all, before the server comes
		synctest.Test(t, func(t *testing.T) {
			const ranks = 3
			j := apart(t, ranks, 1)
			j.Start()
			for range before {
				j.Each(func(rank int) error { _, err := j.Join(rank); return err })
			}
			begun := make(chan struct{})
			j.Each(func(rank int) error {
				switch rank {
				case 0:
					go func() {
						time.Sleep(500 * time.Millisecond)
						j.StartServer()
						time.Sleep(time.Second)
						close(begun)
					}()
				case 1:
					<-begun
					for i := range 8 { // some on the new server, with the zeros of those that have joined
						if _, err := j.Do(rank, jobtest.Float32s(units.Allreduce, fmt.Sprint("late ", i), 1, 5000)); err != nil {
							return err
						}
					}
				}
				if last, err := j.Join(rank); err != nil || last != 1 {
					return fmt.Errorf("the join ends with %d, %w", last, err)
				}
				for i := range 8 {
					if err := j.Sums(rank, fmt.Sprint("late ", i), 3000); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

func TestARankThatHasLeftIsNotWaitedForByAServerThatComes(t *testing.T) {
	for _, first := range []bool{true, false} { // the rank leaves, or the server comes
		synctest.Test(t, func(t *testing.T) {
			j := apart(t, 3, 1)
			j.Start()
			come := func() {
				j.StartServer()
				time.Sleep(time.Second)
			}
			if !first {
				come()
			}
			<-j.Leave(2)
			if first {
				come()
			}
			time.Sleep(time.Second)
			if first { // such a server joins the next round
				return
			}
			j.Settings.NumServers = 1
			errs := make(chan error, 2)
			for rank := range 2 {
				go func() {
					for i := range 8 {
						if _, err := j.Do(rank, jobtest.Float32s(units.Allreduce, fmt.Sprint("x ", i), 1, 5000)); err != nil {
							errs <- err
							return
						}
					}
					errs <- nil
				}()
			}
			for range 2 {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestARankThatHasLeftIsNotWaitedForThoughItsServerStays: by a server that comes, nor by those who agree on a process set.
func TestARankThatHasLeftIsNotWaitedForThoughItsServerStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, _ := apartOn(t, 3, jobtest.Embedded)
		j.Start()
		j.Works("x", 300000)
		left := j.Leave(2)
		time.Sleep(time.Second) // of virtual time: it has said goodbye
		j.StartServer()
		time.Sleep(time.Second)
		for i := range 8 {
			j.Each(func(rank int) error { return sumsTo(j, rank, "x", 300000, 2) })
			j.Each(func(rank int) error { return sumsTo(j, rank, fmt.Sprint("new ", i), 10, 2) })
		}
		two := &jobtest.Job{T: j.T, Settings: j.Settings, Log: j.Log, Workers: j.Workers[:2]}
		two.AddSet([]int{0, 1})
		select {
		case <-left:
			t.Error("its server has not stayed")
		default:
		}
	})
}

// TestARankThatLeavesAsAServerJoinsHoldsNobody: it may have said goodbye to the others before it hears of that one.
func TestARankThatLeavesAsAServerJoinsHoldsNobody(t *testing.T) {
	for name, where := range map[string]jobtest.Option{"dedicated": jobtest.Dedicated(1), "embedded": jobtest.Embedded} {
		t.Run(name, func(t *testing.T) {
			for i := range 40 {
				synctest.Test(t, func(t *testing.T) {
					j, _ := apartOn(t, 3, where)
					j.Start()
					j.Works("x", 300000)
					j.StartServer()
					time.Sleep(time.Duration(i) * 500 * time.Microsecond) // of virtual time
					j.Leave(2)
					time.Sleep(time.Second)
					j.Each(func(rank int) error { return sumsTo(j, rank, "x", 300000, 2) })
				})
			}
		})
	}
}

// TestAServerWithAnotherSecretDoesNotJoin: it hears why, and the job goes on.
func TestAServerWithAnotherSecretDoesNotJoin(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.Dedicated(1), jobtest.Elastic)
	j.Works("x", 10000)
	s := j.Settings
	s.Role, s.JobSecret = "server", []byte("another secret, not that of the job")
	ctx, cancel := context.WithTimeout(t.Context(), jobtest.Hang)
	defer cancel()
	if err := node.RunServer(ctx, s, "", node.Options{Log: zap.NewNop()}); err == nil || !strings.Contains(err.Error(), "secret") {
		t.Errorf("%v, want an error that names the secret", err)
	}
	j.Works("x", 10000)
}
