package jobtest_test

import (
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// TestRoundsFollowEachOther inits and shuts down hundreds of times in one process, with the same
// scheduler and dedicated server, and leaves nothing behind.
func TestRoundsFollowEachOther(t *testing.T) {
	rounds := 200
	if race {
		rounds = 30
	}
	j := newJob(t, 2, both(1))
	var before int
	for i := range rounds {
		j.start()
		j.works("x", 1000+i)
		if i%7 == 0 {
			j.works("", 5<<20)
		}
		j.shutdown()
		if i == 5 {
			before = runtime.NumGoroutine()
		}
	}
	eventually(t, fmt.Sprintf("goroutines do not come down to %d", before+5), func() bool { return runtime.NumGoroutine() <= before+5 })
}

// eventually polls for what happens in its own time elsewhere.
func eventually(t testing.TB, failure string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(hang)
	for !ok() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatal(failure)
		}
	}
}

// TestOthersGetAnErrorThatNamesTheRankThatShutsDown while they wait for it, at once.
func TestOthersGetAnErrorThatNamesTheRankThatShutsDown(t *testing.T) {
	for _, place := range []jobOption{func(*job) {}, dedicated(2)} {
		j := startJob(t, 3, smallPartitions, place)
		waiting := make(chan []error, 1)
		others := &job{t: t, workers: slices.Clone(j.workers[:2])}
		all := j.all()
		go func() {
			waiting <- others.outcomes(func(rank int) error {
				op := sum("x", 100000)
				op.Set = all
				_, err := others.do(rank, op)
				return err
			})
		}()
		j.leave(2)
		errs := <-waiting
		for rank, err := range errs {
			if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), `"x" cannot be done: rank 2 has shut down`) {
				t.Errorf("rank %d: %v, want it to say that rank 2 has shut down", rank, err)
			}
		}
		j.shutdown()
	}
}

func TestShutdownEndsWhatIsInFlight(t *testing.T) {
	j := startJob(t, 2, smallPartitions)
	mine, err := j.submit(0, sum("x", 200000), sum("y", 5))
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := j.submit(1, sum("y", 5))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := await(mine[1], 0, "y"); err != nil {
		t.Fatal(err)
	}
	if _, err := await(theirs[0], 1, "y"); err != nil {
		t.Fatal(err)
	}
	engine := j.workers[0].Engine
	j.leave(0)
	if _, err := await(mine[0], 0, "x"); !errors.Is(err, worker.ErrShutdown) || !strings.Contains(err.Error(), `allreduce of "x" on rank 0`) {
		t.Errorf("what was in flight: %v", err)
	}
	if _, err := j.do(1, sum("x", 200000)); err == nil || !strings.Contains(err.Error(), "rank 0") || !strings.Contains(err.Error(), "shut") {
		t.Errorf("on the other rank: %v, want it to name rank 0, which shuts down", err)
	}
	if err := engine.Submit([]worker.Op{{Kind: units.Barrier, Set: j.all()}}); !errors.Is(err, worker.ErrShutdown) {
		t.Error("an engine that was shut down took an operation")
	}
}

func TestADedicatedServerThatLeavesEndsTheRound(t *testing.T) {
	j := startJob(t, 2, dedicated(2), smallPartitions)
	j.works("x", 300000)
	j.stopServers[0]()
	errs := j.outcomes(func(rank int) error {
		_, err := j.do(rank, sum("x", 300000))
		return err
	})
	for rank, err := range errs {
		if err == nil || !regexp.MustCompile(`server [01] .*(was stopped|has shut down)`).MatchString(err.Error()) {
			t.Errorf("rank %d: %v, want it to name the server that was stopped", rank, err)
		}
	}
}

// TestTrainingDoesNotNoticeThatTheSchedulerIsKilled: known tensors go on without one, and new ones
// wait for the next.
func TestTrainingDoesNotNoticeThatTheSchedulerIsKilled(t *testing.T) {
	j := startJob(t, 3, with(func(s *settings.Settings) { s.BeatInterval, s.PeerTimeout = 50*time.Millisecond, 2*time.Second }))
	var steps atomic.Int64
	stop := make(chan struct{})
	trained := make(chan []error, 1)
	go func() {
		trained <- j.outcomes(func(rank int) error {
			for step := 0; ; step++ {
				if err := j.sums(rank, "gradient", 20000); err != nil {
					return err
				}
				if rank == 0 {
					steps.Add(1)
				}
				op := sum("go on", 1) // the ranks stop together
				select {
				case <-stop:
					op.Input[0] = 0
				default:
				}
				if _, err := j.do(rank, op); err != nil || op.Output[0] < 3 {
					return err
				}
			}
		})
	}()
	eventually(t, "training does not begin", func() bool { return steps.Load() > 1 }) // both tensors are declared
	for i := range 3 {
		before := steps.Load()
		j.sched.Close()
		eventually(t, "training stands still without a scheduler", func() bool { return steps.Load() > before+20 })
		waiting := make(chan []error, 1)
		go func() {
			waiting <- j.outcomes(func(rank int) error { return j.sums(rank, fmt.Sprint("new while there is none ", i), 100) })
		}()
		before = steps.Load()
		eventually(t, "training stands still without a scheduler", func() bool { return steps.Load() > before+20 })
		sched, err := node.StartScheduler(j.settings, j.settings.Scheduler, j.log)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sched.Close() })
		j.sched = sched
		for rank, err := range <-waiting {
			if err != nil {
				t.Fatalf("rank %d: a tensor declared while there was no scheduler: %v", rank, err)
			}
		}
		j.works(fmt.Sprint("new afterwards ", i), 100)
	}
	close(stop)
	for rank, err := range <-trained {
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
}
