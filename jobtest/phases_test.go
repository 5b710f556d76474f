package jobtest_test

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
)

// phases of a rank's life, in order.
var phases = []string{"before init", "init", "sum", "join", "shutdown", "over"}

// life is one run of a job in which a node is stopped for good at some moment.
type life struct {
	*jobtest.Job
	mu    sync.Mutex
	phase []string // of each rank
	errs  []error
	took  []time.Duration
}

// TestARankThatIsStoppedForLongInAnyPhaseHoldsNobody: the others end, with an error that names it or well, and so does it when it
// runs again.
func TestARankThatIsStoppedForLongInAnyPhaseHoldsNobody(t *testing.T) {
	for name, place := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
		t.Run(name, func(t *testing.T) {
			seen := map[string]int{}
			for at := time.Duration(0); seen["over"] == 0; at += 500 * time.Microsecond {
				if at > time.Second {
					t.Fatalf("the job is not over: %v", seen)
				}
				synctest.Test(t, func(t *testing.T) { seen[stopAt(t, place, at)]++ })
			}
			for _, p := range phases {
				if seen[p] == 0 {
					t.Errorf("no stop in phase %q: %v", p, seen)
				}
			}
			t.Log(seen)
		})
	}
}

const (
	stopped = 2 * time.Minute // for how long
	patient = time.Minute     // the longest of all limits: the start, or a peer's silence and the wait for others at the end
)

// stopAt stops rank 1 of a job at a time, and returns in which phase that was.
func stopAt(t *testing.T, place jobtest.Option, at time.Duration) string {
	network := transporttest.NewNetwork(transporttest.Options{Latency: time.Millisecond})
	t.Cleanup(network.Close)
	l := &life{Job: jobtest.New(t, 3, place, jobtest.Transports(func(rank int) *transport.Set {
		return transport.NewSet(nil, network.Node(nodeName(rank), []byte(jobtest.Secret)))
	})), errs: make([]error, 3), took: make([]time.Duration, 3)}
	l.phase = slices.Repeat([]string{phases[0]}, 3)
	if err := network.Script(fmt.Sprintf("at %v worker1 stop\nat %v worker1 continue", at, at+stopped)); err != nil {
		t.Fatal(err)
	}
	then := make(chan string, 1)
	defer time.AfterFunc(at, func() { then <- l.of(1) }).Stop()
	var wg sync.WaitGroup
	began := time.Now()
	for rank := range 3 {
		wg.Go(func() {
			time.Sleep(2 * time.Millisecond)
			l.errs[rank] = l.live(rank)
			l.took[rank] = time.Since(began)
		})
	}
	wg.Wait()
	when := phases[len(phases)-1]
	if len(then) > 0 {
		when = <-then
	}
	for _, rank := range []int{0, 2} {
		err := l.errs[rank]
		if l.took[rank] > at+patient || err != nil && !regexp.MustCompile(`(rank|worker) 1\b`).MatchString(err.Error()) {
			t.Errorf("rank 1 stopped at %v, in %s: rank %d ended after %v, in %s: %v", at, when, rank, l.took[rank], l.of(rank), err)
		}
	}
	if l.took[1] > at+stopped+patient {
		t.Errorf("rank 1 stopped at %v, in %s: it ended after %v: %v", at, when, l.took[1], l.errs[1])
	}
	if err := errors.Join(l.errs...); when == "over" && err != nil {
		t.Errorf("rank 1 was not stopped before it was over: %v", err)
	}
	return when
}

// live is a rank's life.
func (l *life) live(rank int) error {
	l.enter(rank, "init")
	if err := l.StartRank(rank); err != nil {
		return fmt.Errorf("init: %w", err)
	}
	l.enter(rank, "sum")
	if err := l.Sums(rank, "x", 10000); err != nil {
		return err
	}
	l.enter(rank, "join")
	if _, err := l.Join(rank); err != nil {
		return fmt.Errorf("join: %w", err)
	}
	l.enter(rank, "shutdown")
	l.Workers[rank].Shutdown()
	l.Workers[rank] = nil
	l.enter(rank, "over")
	return nil
}

func (l *life) enter(rank int, phase string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.phase[rank] = phase
}

func (l *life) of(rank int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.phase[rank]
}
