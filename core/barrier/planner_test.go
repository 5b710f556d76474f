package barrier_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/paceline/paceline/core/barrier"
	"github.com/paceline/paceline/internal/rankset"
)

// job runs workers of fixed intervals under a planner in virtual time.
type job struct {
	t        *testing.T
	p        *barrier.Planner
	live     rankset.Set
	interval []time.Duration
	next     []time.Duration // when each worker's running iteration ends
	done     []uint64        // iterations of this superstep
	stop     []uint64        // 0: not known
	waits    []bool
	plans    []barrier.Plan
	passed   []time.Duration // when each barrier fell
}

func newJob(t *testing.T, predictions int, intervals ...time.Duration) *job {
	n := len(intervals)
	j := &job{t: t, live: rankset.Range(n), interval: intervals, next: append([]time.Duration(nil), intervals...),
		done: make([]uint64, n), stop: make([]uint64, n), waits: make([]bool, n)}
	j.p = barrier.NewPlanner(j.live, predictions)
	return j
}

// step ends the iteration that ends next.
func (j *job) step() {
	r := -1
	for q := range j.next {
		if j.live.Has(q) && !j.waits[q] && (r < 0 || j.next[q] < j.next[r]) {
			r = q
		}
	}
	if r < 0 {
		j.t.Fatal("everybody waits for ever")
	}
	now := j.next[r]
	j.done[r]++
	j.waits[r] = j.stop[r] > 0 && j.done[r] >= j.stop[r]
	j.next[r] += j.interval[r]
	before := j.p.Superstep()
	j.hear(j.p.Push(r, now, j.waits[r]))
	j.pass(before, now)
}

func (j *job) hear(plan barrier.Plan, ok bool) {
	if !ok {
		return
	}
	j.plans = append(j.plans, plan)
	for _, s := range plan.Stops {
		j.stop[s.Rank] = s.Iteration
	}
}

// pass lets all go on if the barrier has fallen.
func (j *job) pass(before uint64, now time.Duration) {
	if j.p.Superstep() == before {
		return
	}
	j.passed = append(j.passed, now)
	for r := range j.next {
		j.done[r], j.stop[r], j.waits[r] = 0, 0, false
		j.next[r] = now + j.interval[r]
	}
}

func (j *job) setLive(live rankset.Set, now time.Duration) {
	j.live = live
	before := j.p.Superstep()
	j.hear(j.p.Live(live))
	j.pass(before, now)
}

// algorithms.md section 5: two pushes of each worker make its interval; the barrier falls where the
// predicted ends lie closest; each worker gets the iteration at which it stops; then it starts over.
func TestPlannerPlansTheBarrierOfLeastWait(t *testing.T) {
	j := newJob(t, 4, 3, 4, 6)
	for len(j.passed) < 3 {
		j.step()
	}
	// Rank 2's second push at 12 makes the plan, when the others have done 4 and 3: ends 15 18 21 24,
	// 16 20 24 28 and 18 24 30 36 meet at 24.
	want := "{0 {24ns 0s} [{0 8} {1 6} {2 4}]}"
	if got := fmt.Sprint(j.plans[0]); got != want {
		t.Errorf("plan %s, want %s", got, want)
	}
	// Intervals are the same and count from the barrier, so every superstep repeats the first.
	if got := fmt.Sprint(j.passed); got != "[24ns 48ns 72ns]" {
		t.Errorf("barriers at %s", got)
	}
}

// The wait at a barrier is no part of an interval.
func TestPlannerLeavesTheWaitOut(t *testing.T) {
	p := barrier.NewPlanner(rankset.Range(1), 1)
	p.Push(0, 10, false)
	if plan, ok := p.Push(0, 15, false); !ok || plan.At != 20 || plan.Stops[0] != (barrier.Stop{Rank: 0, Iteration: 3}) {
		t.Fatalf("%+v, %v", plan, ok)
	}
	p.Push(0, 20, true)
	if _, ok := p.Push(0, 1000, false); ok || p.Superstep() != 1 {
		t.Fatal("a plan after one push of the superstep")
	}
	if plan, ok := p.Push(0, 1005, false); !ok || plan.Superstep != 1 || plan.At != 1010 {
		t.Fatalf("%+v, %v", plan, ok)
	}
}

// A worker that dies leaves the computation, before a plan and after it.
func TestPlannerGoesOnWithoutALostWorker(t *testing.T) {
	j := newJob(t, 4, 3, 4, 1000)
	for range 8 {
		j.step()
	}
	if len(j.plans) != 0 {
		t.Fatal("a plan before the slowest has pushed twice")
	}
	j.setLive(rankset.Of(0, 1), 16)
	if len(j.plans) != 1 || len(j.plans[0].Stops) != 2 {
		t.Fatalf("plans %v", j.plans)
	}
	for !j.waits[0] && len(j.passed) == 0 {
		j.step()
	}
	j.setLive(rankset.Of(0), 25)
	for len(j.passed) < 2 {
		j.step()
	}
}

// A worker that comes while a plan is there ends its superstep with its first iteration.
func TestPlannerTakesANewcomerIn(t *testing.T) {
	j := newJob(t, 4, 3, 4, 5)
	j.live = rankset.Range(2)
	j.p = barrier.NewPlanner(j.live, 4)
	for len(j.plans) == 0 {
		j.step()
	}
	j.next[2] = 14
	j.setLive(rankset.Range(3), 9)
	if late := j.plans[1]; len(late.Stops) != 1 || late.Stops[0] != (barrier.Stop{Rank: 2, Iteration: 1}) || late.At != j.plans[0].At {
		t.Fatalf("plan for the newcomer %+v", late)
	}
	for len(j.passed) == 0 {
		j.step()
	}
	for len(j.plans) < 3 {
		j.step()
	}
	if len(j.plans[2].Stops) != 3 {
		t.Errorf("next plan %+v", j.plans[2])
	}
}

// A prediction that is wrong, a plan that is heard too late and workers that come and go at any time
// cost barriers, never the run.
func TestPlannerNeverStopsAJob(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		intervals := make([]time.Duration, 1+rng.IntN(6))
		for r := range intervals {
			intervals[r] = time.Duration(1 + rng.IntN(50))
		}
		j := newJob(t, 1+rng.IntN(10), intervals...)
		for steps := 0; len(j.passed) < 20; steps++ {
			if steps > 100_000 {
				t.Fatalf("seed %d: %d barriers in %d pushes", seed, len(j.passed), steps)
			}
			j.step()
			r := rng.IntN(len(intervals))
			switch k := rng.IntN(20); {
			case k == 0:
				j.interval[r] = time.Duration(1 + rng.IntN(50))
			case k == 1 && j.stop[r] > 0:
				j.stop[r] += uint64(rng.IntN(3)) // it heard of it late
			case k == 2:
				live := j.live.Clone()
				if !live.Remove(r) || live.Len() == 0 {
					live.Add(r)
				}
				j.come(live)
			}
		}
	}
}

// come changes the membership now; who comes begins an iteration.
func (j *job) come(live rankset.Set) {
	var now time.Duration
	for _, r := range j.live.Ranks() {
		now = max(now, j.next[r]-j.interval[r])
	}
	for _, r := range live.Minus(j.live).Ranks() {
		j.done[r], j.stop[r], j.waits[r] = 0, 0, false
		j.next[r] = now + j.interval[r]
	}
	j.setLive(live, now)
}
