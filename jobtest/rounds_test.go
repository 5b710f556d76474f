package jobtest_test

import (
	"errors"
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// TestRoundsFollowEachOther initialises and shuts down hundreds of times in one process, with the same scheduler and
// dedicated server. No memory or goroutine is left.
func TestRoundsFollowEachOther(t *testing.T) {
	rounds := 200
	if race {
		rounds = 30
	}
	j := jobtest.New(t, 2, jobtest.Both(1))
	var before int
	for i := range rounds {
		j.Start()
		j.Works("x", 1000+i)
		if i%7 == 0 {
			j.Works("", 5<<20)
		}
		j.Shutdown()
		if i == 5 {
			before = runtime.NumGoroutine()
		}
	}
	jobtest.Eventually(t, fmt.Sprintf("goroutines do not come down to %d", before+5), func() bool { return runtime.NumGoroutine() <= before+5 })
}

// TestOthersGetAnErrorThatNamesTheRankThatShutsDown while they wait for it, at once.
func TestOthersGetAnErrorThatNamesTheRankThatShutsDown(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.Pairs(2)} {
		j := jobtest.Start(t, 3, jobtest.SmallPartitions, place)
		waiting := make(chan []error, 1)
		others := j.First(2)
		all := j.All()
		go func() {
			waiting <- others.Outcomes(func(rank int) error {
				op := jobtest.Sum("x", 100000)
				op.Set = all
				_, err := others.Do(rank, op)
				return err
			})
		}()
		j.Leave(2)
		errs := <-waiting
		for rank, err := range errs {
			if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), `"x" cannot be done: rank 2 has shut down`) {
				t.Errorf("rank %d: %v, want it to say that rank 2 has shut down", rank, err)
			}
		}
		j.Shutdown()
	}
}

func TestShutdownEndsWhatIsInFlight(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.SmallPartitions)
	mine, err := j.Submit(0, jobtest.Sum("x", 200000), jobtest.Sum("y", 5))
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := j.Submit(1, jobtest.Sum("y", 5))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := jobtest.Await(mine[1], 0, "y"); err != nil {
		t.Fatal(err)
	}
	if _, err := jobtest.Await(theirs[0], 1, "y"); err != nil {
		t.Fatal(err)
	}
	engine := j.Workers[0].Engine
	j.Leave(0)
	if _, err := jobtest.Await(mine[0], 0, "x"); !errors.Is(err, worker.ErrShutdown) || !strings.Contains(err.Error(), `allreduce of "x" on rank 0`) {
		t.Errorf("what was in flight: %v", err)
	}
	if _, err := j.Do(1, jobtest.Sum("x", 200000)); err == nil || !strings.Contains(err.Error(), "rank 0") || !strings.Contains(err.Error(), "shut") {
		t.Errorf("on the other rank: %v, want it to name rank 0, which shuts down", err)
	}
	if err := engine.Submit([]worker.Op{{Kind: units.Barrier, Set: j.All()}}); !errors.Is(err, worker.ErrShutdown) {
		t.Error("an engine that was shut down took an operation")
	}
}

func TestADedicatedServerThatLeavesEndsTheRound(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.Dedicated(2), jobtest.SmallPartitions)
	j.Works("x", 300000)
	j.StopServer(0)
	errs := j.Outcomes(func(rank int) error {
		_, err := j.Do(rank, jobtest.Sum("x", 300000))
		return err
	})
	for rank, err := range errs {
		if err == nil || !regexp.MustCompile(`server [01] .*(was stopped|has shut down)`).MatchString(err.Error()) {
			t.Errorf("rank %d: %v, want it to name the server that was stopped", rank, err)
		}
	}
}

// TestTrainingDoesNotNoticeThatTheSchedulerIsKilled: operations on known tensors go on without a scheduler; new tensors
// wait for the next one.
func TestTrainingDoesNotNoticeThatTheSchedulerIsKilled(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{Latency: 5 * time.Millisecond}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.With(func(s *settings.Settings) { s.PeerTimeout = 2 * time.Second }))
		var steps atomic.Int64
		stop := make(chan struct{})
		trained := make(chan []error, 1)
		go func() {
			trained <- j.Outcomes(func(rank int) error {
				for step := 0; ; step++ {
					if err := j.Sums(rank, "gradient", 20000); err != nil {
						return err
					}
					if rank == 0 {
						steps.Add(1)
					}
					op := jobtest.Sum("go on", 1) // the ranks stop together
					select {
					case <-stop:
						op.Input[0] = 0
					default:
					}
					if _, err := j.Do(rank, op); err != nil || op.Output[0] < 3 {
						return err
					}
				}
			})
		}()
		jobtest.Eventually(t, "training does not begin", func() bool { return steps.Load() > 1 }) // both tensors are declared
		for i := range 3 {
			before := steps.Load()
			j.Scheduler.Close()
			jobtest.Eventually(t, "training stands still without a scheduler", func() bool { return steps.Load() > before+20 })
			waiting := make(chan []error, 1)
			go func() {
				waiting <- j.Outcomes(func(rank int) error { return j.Sums(rank, fmt.Sprint("new while there is none ", i), 100) })
			}()
			before = steps.Load()
			jobtest.Eventually(t, "training stands still without a scheduler", func() bool { return steps.Load() > before+20 })
			j.StartScheduler(j.Settings.Scheduler)
			for rank, err := range <-waiting {
				if err != nil {
					t.Fatalf("rank %d: a tensor declared while there was no scheduler: %v", rank, err)
				}
			}
			j.Works(fmt.Sprint("new afterwards ", i), 100)
		}
		close(stop)
		for rank, err := range <-trained {
			if err != nil {
				t.Fatalf("rank %d: %v", rank, err)
			}
		}
	})
}
