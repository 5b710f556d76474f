package jobtest_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/cmd/paceline/watch"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

var (
	drains    = flag.Int("drains", seeds(6), "how many seeds TestServersLeaveAtRandomMomentsWithNothingLost runs")
	drainSeed = flag.Uint64("drain", 0, "the first of them: a seed that failed")
)

// TestServersLeaveAtRandomMomentsWithNothingLost plays jobs whose servers are told to end at any time, all but one. No operation fails, and all give what they
// give without that, bit for bit.
func TestServersLeaveAtRandomMomentsWithNothingLost(t *testing.T) {
	for seed := *drainSeed; seed < *drainSeed+uint64(*drains); seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { playDrains(t, seed) })
			if t.Failed() {
				t.Logf("again: go test -tags invariants ./jobtest -run TestServersLeaveAtRandomMoments -drain %d -drains 1", seed)
			}
		})
	}
}

func playDrains(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 14))
	ranks, servers := 2+random.IntN(3), 2+random.IntN(3)
	m := jobtest.NewMeans(random, ranks, 1+random.IntN(50000), 60, servers)
	m.Lost, m.Heirs = nil, true
	warnings := make(chan string, 1000)
	j, _ := lendingOn(t, ranks, seed%2 == 1, jobtest.Dedicated(servers), jobtest.Warnings(warnings))
	j.Settings.Connections = 1 + random.IntN(2)
	j.Start()
	var leaving sync.WaitGroup
	for _, i := range random.Perm(servers)[1:] {
		at := time.Duration(random.IntN(800)) * time.Millisecond
		leaving.Go(func() {
			time.Sleep(at) // virtual
			j.StopServer(i)
		})
	}
	errs := j.Outcomes(func(rank int) error {
		others := make(chan error)
		go func() { others <- exchanges(j, rank, 25) }()
		err := m.Train(j, rank)
		if other := <-others; err == nil {
			err = other
		}
		return err
	})
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d of %d, with %d servers: %v", rank, ranks, servers, err)
		}
	}
	if t.Failed() {
		return
	}
	leaving.Wait()
	if err := m.Check(); err != nil {
		t.Errorf("%d ranks, %d servers: %v", ranks, servers, err)
	}
	for len(warnings) > 0 {
		t.Errorf("a warning: %s", <-warnings)
	}
}

// apart is an elastic job each of whose processes has a host of its own.
func apart(t *testing.T, ranks, servers int, options ...jobtest.Option) *jobtest.Job {
	j, _ := apartOn(t, ranks, jobtest.Dedicated(servers), options...)
	return j
}

// apartOn has its servers where an option says, and gives its network too.
func apartOn(t *testing.T, ranks int, where jobtest.Option, options ...jobtest.Option) (*jobtest.Job, *transporttest.Network) {
	return lendingOn(t, ranks, false, where, options...)
}

// lendingOn is apartOn, perhaps with hosts that lend each other memory.
func lendingOn(t *testing.T, ranks int, lends bool, where jobtest.Option, options ...jobtest.Option) (*jobtest.Job, *transporttest.Network) {
	network := transporttest.NewNetwork(transporttest.Options{Latency: time.Millisecond, Bandwidth: 20 << 20, PeerTimeout: 3 * time.Second, Lends: lends})
	t.Cleanup(network.Close)
	return jobtest.New(t, ranks, append(options, where, jobtest.Elastic, jobtest.SmallPartitions, eachOn(network))...), network
}

// TestADrainSuspendsTrainingForAnIterationAtMost and 100 ms.
func TestADrainSuspendsTrainingForAnIterationAtMost(t *testing.T) {
	suspended(t, "the drain of a server", func(j *jobtest.Job) { j.StopServer(0) }, func(*testing.T, []int) {}, sumGradient)
}

// TestAServerThatJoinsTakesItsShareOfTheKeysInUse has no iteration take more than one more, and 100 ms.
func TestAServerThatJoinsTakesItsShareOfTheKeysInUse(t *testing.T) {
	suspended(t, "a server that joins", (*jobtest.Job).StartServer, takesItsShare, sumGradient)
}

func takesItsShare(t *testing.T, servers []int) {
	count := map[int]int{}
	for _, s := range servers {
		count[s]++
	}
	if share := len(servers) / 3; count[2] < share || count[2] > share+1 {
		t.Errorf("partitions by server in the end: %v, of %d", count, len(servers))
	}
}

func sumGradient(j *jobtest.Job, rank, _ int) error { return j.Sums(rank, "gradient", 200000) }

// suspended trains in virtual time: links and waits count, computing does not. A suspension by a change of servers is what the longest iteration takes more than one
// after the change. check gets the servers of all partitions in the last iteration.
func suspended(t *testing.T, by string, change func(*jobtest.Job), check func(t *testing.T, servers []int), step func(j *jobtest.Job, rank, iteration int) error) {
	const jobs, ranks, iterations = 12, 3, 20
	var all []time.Duration
	var usual time.Duration
	told := 0
	for seed := range uint64(jobs) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 15))
			j := apart(t, ranks, 2)
			j.Start()
			at := time.Duration(random.IntN(100)) * time.Millisecond
			var changing sync.WaitGroup
			changing.Go(func() {
				time.Sleep(at)
				change(j)
			})
			var took []time.Duration
			var last pushedTo
			j.Each(func(rank int) error {
				for i := range iterations {
					if rank == 0 && i == iterations-1 {
						j.Workers[rank].Engine.Observe(&last)
					}
					began := time.Now()
					if err := step(j, rank, i); err != nil {
						return err
					}
					if rank == 0 {
						took = append(took, time.Since(began))
					}
				}
				return j.Sums(rank, "end", 1)
			})
			changing.Wait()
			usual = took[iterations-1]
			suspension := slices.Max(took) - usual
			if suspension > usual+100*time.Millisecond {
				t.Errorf("seed %d: %s after %v, and an iteration took %v longer than the %v that it takes afterwards: %v", seed, by, at, suspension, usual, took)
			}
			check(t, last.servers)
			for _, w := range j.Workers {
				if s := w.Engine.Progress().Suspension; s != nil && (s.Epoch == 0 || s.Last <= 0 || s.Worst < s.Last || s.Worst > (usual+100*time.Millisecond).Seconds()) {
					t.Errorf("seed %d: a suspension by %s of %+v", seed, by, s)
				} else if s != nil {
					told++
				}
			}
			all = append(all, suspension)
		})
	}
	if told == 0 {
		t.Errorf("no worker tells of a suspension by %s", by)
	}
	slices.Sort(all)
	t.Logf("suspension by %s, of %d: median %v, p99 %v; an iteration takes %v", by, jobs, all[jobs/2], all[jobs*99/100], usual)
}

// TestARankThatHearsLateOfAMoveHoldsUpNobodyForLonger: the scheduler's word that keys have been moved reaches one rank two seconds after their servers, which send away
// what that rank pushes meanwhile.
func TestARankThatHearsLateOfAMoveHoldsUpNobodyForLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, network := apartOn(t, 2, jobtest.Dedicated(2))
		j.Start()
		j.Works("gradient", 200000)
		if err := network.Script("at 0s servers->worker1 freeze\nat 2s servers->worker1 thaw"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
		j.StartServer()
		const iterations = 30
		var last pushedTo
		began := time.Now()
		j.Each(func(rank int) error {
			for i := range iterations {
				if rank == 1 && i == iterations-1 {
					j.Workers[rank].Engine.Observe(&last)
				}
				if err := j.Sums(rank, "gradient", 200000); err != nil {
					return err
				}
			}
			return nil
		})
		if took := time.Since(began); took < 2*time.Second || took > 4*time.Second {
			t.Errorf("%d iterations took %v, want the two seconds that rank 1 had to wait, and little more", iterations, took)
		}
		if !slices.Contains(last.servers, 2) {
			t.Errorf("in the end rank 1 pushes to servers %v, want the one that has joined among them", last.servers)
		}
	})
}

// pushedTo notes the servers that an engine's exchanges are with.
type pushedTo struct{ servers []int }

// Ended implements worker.Observer.
func (p *pushedTo) Ended(_ worker.Observed, exchanges []worker.Exchange, _ error) {
	for _, x := range exchanges {
		p.servers = append(p.servers, x.Server)
	}
}

// exchanges has a rank do what a server carries from rank to rank: broadcasts, allgather, alltoall, and messages of all sizes in a ring.
func exchanges(j *jobtest.Job, rank, steps int) error {
	ranks := len(j.Workers)
	next, before := (rank+1)%ranks, (rank+ranks-1)%ranks
	for step := range steps {
		n := []int{10, 3000, 200000}[step%3]
		broadcast := worker.Op{Kind: units.Broadcast, DType: units.Uint8, Name: fmt.Sprint("b", step%2), Root: step % ranks, Shape: []int64{int64(n)}, Input: pattern(n, uint64(step)), Output: make([]byte, n)}
		if rank != broadcast.Root { // which brings nothing
			clear(broadcast.Input)
		}
		gather := worker.Op{Kind: units.Allgather, DType: units.Uint8, Name: "g", Shape: []int64{int64(n + rank)}, Input: pattern(n+rank, uint64(rank))}
		swap := worker.Op{Kind: units.Alltoall, DType: units.Uint8, Name: "a", Shape: []int64{int64(ranks), int64(n)}, Input: bytes.Repeat(pattern(n, uint64(rank)), ranks)}
		var got [3][]byte
		ops := []worker.Op{broadcast, gather, swap}
		for i := range got {
			got[i] = make([]byte, n)
			ops = append(ops, send(next, 1, pattern(n, uint64(100*step+10*rank+i))), receive(before, 1, got[i]))
		}
		results, err := j.Submit(rank, ops...)
		if err != nil {
			return err
		}
		for i, done := range results {
			out, err := jobtest.Await(done, rank, fmt.Sprint(ops[i].Kind))
			if err != nil {
				return fmt.Errorf("exchange %d, %v: %w", step, ops[i].Kind, err)
			}
			var want []byte
			for from := range ranks {
				switch ops[i].Kind {
				case units.Allgather:
					want = append(want, pattern(n+from, uint64(from))...)
				case units.Alltoall:
					want = append(want, pattern(n, uint64(from))...)
				}
			}
			if !bytes.Equal(out.Data, want) {
				return fmt.Errorf("exchange %d: %v gives other bytes", step, ops[i].Kind)
			}
		}
		if !bytes.Equal(broadcast.Output, pattern(n, uint64(step))) {
			return fmt.Errorf("exchange %d: the broadcast gives other bytes", step)
		}
		for i := range got {
			if !bytes.Equal(got[i], pattern(n, uint64(100*step+10*before+i))) {
				return fmt.Errorf("exchange %d: message %d has other bytes", step, i)
			}
		}
	}
	return nil
}

// A drain of what cannot leave is an error that says why, and the job goes on.
func TestADrainThatIsImpossible(t *testing.T) {
	ask := func(t *testing.T, j *jobtest.Job, server string, want ...string) {
		t.Helper()
		client, err := control.Dial(t.Context(), control.Config{Transport: j.Transports().Required(), Address: j.Settings.Scheduler, Hello: wire.Hello{Role: wire.RoleObserver}})
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		err = client.Drain(t.Context(), wire.Drain{Server: server})
		for _, words := range want {
			if err == nil || !strings.Contains(err.Error(), words) {
				t.Errorf("drain %q: %v, want %q", server, err, words)
			}
		}
		if len(want) == 0 && err != nil {
			t.Errorf("drain %q: %v", server, err)
		}
	}
	t.Run("elastic", func(t *testing.T) {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
			j := jobtest.New(t, 2, network, jobtest.Dedicated(2), jobtest.Elastic)
			ask(t, j, "0", "has not started")
			j.Start()
			j.Works("x", 100)
			ask(t, j, "7", `no dedicated server "7"`, "it has 0 (", "1 (")
		})
	})
	t.Run("the last", func(t *testing.T) {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
			j := jobtest.Start(t, 2, network, jobtest.Dedicated(2), jobtest.Elastic)
			j.Works("x", 100)
			ask(t, j, "1")
			ask(t, j, "1") // again: it has left
			ask(t, j, "0", "the last server")
			j.Works("x", 100)
			works(j)
		})
	})
	t.Run("the last, beside those in workers", func(t *testing.T) { // is none
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
			j := jobtest.Start(t, 2, network, jobtest.Both(1), jobtest.Elastic)
			j.Works("x", 100)
			j.Works("y", 100)
			ask(t, j, "2")
			j.Works("x", 100)
			j.Works("z", 100)
		})
	})
	t.Run("lost before", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			j, network := apartOn(t, 2, jobtest.Dedicated(2))
			j.Start()
			j.Works("x", 100)
			lose(t, network, 2, 0)
			j.Works("x", 100)
			ask(t, j, "0", "server 0 has gone already", "the others go on without it")
		})
	})
	t.Run("static", func(t *testing.T) {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
			j := jobtest.Start(t, 2, network, jobtest.Dedicated(2))
			j.Works("x", 100)
			ask(t, j, "1", "not elastic")
			j.Works("x", 100)
		})
	})
}

// A server of a static job ends as soon as it is told to, with what it holds; its workers hear of that.
func TestAServerOfAStaticJobDoesNotWaitForItsValues(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, jobtest.Dedicated(1))
		j.Each(func(rank int) error {
			_, err := j.Declare(rank, "v", "bsp", 50000)
			return err
		})
		j.StopServer(0)
		for rank, err := range j.Outcomes(func(rank int) error { _, err := j.Do(rank, jobtest.Sum("x", 100)); return err }) {
			if err == nil || !strings.Contains(err.Error(), "has shut down") && !strings.Contains(err.Error(), "was stopped") {
				t.Errorf("rank %d: %v, want an error that says that the server was stopped", rank, err)
			}
		}
	})
}

// TestDrainedServersOfProcessesHoldNobody: one is told by SIGTERM and one from elsewhere while all ranks train, which check every sum. The servers end, and
// the last one stays.
func TestDrainedServersOfProcessesHoldNobody(t *testing.T) {
	f := jobtest.StartFleet(t, 2, 3, "PACELINE_ELASTIC=1")
	f.Servers[1].Terminate()
	if err := f.Servers[1].Failure(); err != "" {
		t.Error(err)
	}
	f.Steps()
	s := f.Settings()
	s.JobSecret = []byte("another secret of this job")
	ctx, cancel := context.WithTimeout(t.Context(), jobtest.Hang)
	defer cancel()
	if err := watch.Drain(ctx, &s, "0"); err == nil || !strings.Contains(err.Error(), "secret") {
		t.Errorf("with another secret: %v", err)
	}
	s = f.Settings()
	left := 0
	for _, i := range []string{"0", "1", "2"} { // in the order of their addresses: one has left before
		if err := watch.Drain(ctx, &s, i); err == nil {
			left++
		} else if !strings.Contains(err.Error(), "the last server") {
			t.Errorf("server %s: %v", i, err)
		}
	}
	if left != 2 {
		t.Errorf("%d servers have left of three, want two", left)
	}
	f.Steps()
}
