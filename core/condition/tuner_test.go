package condition

import (
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/rankset"
)

const ms = time.Millisecond

// DSSP's rule within its range: the fastest worker stops where the slowest's next push is nearest.
func TestDSPSTakesTheStalenessOfLeastPredictedWait(t *testing.T) {
	r := Range{3, 15}
	for name, c := range map[string]struct {
		fast, slow Report
		want       uint64
	}{
		// Ends at 40, 80, … against pushes at 100, 200, …: from s = 3 on it waits 60, 20, 80, 40, 0.
		"next push": {Report{Pushed: 9, Interval: 40 * ms}, Report{Pushed: 6, Interval: 100 * ms}, 7},
		// At s = 3 it goes no further, and the slowest is done at the same time.
		"at once": {Report{Pushed: 10, At: 100 * ms, Interval: 40 * ms}, Report{Pushed: 6, Interval: 100 * ms}, 3},
		// One more push leaves s iterations: at s = 4 four of 30, which end with the slowest's of 120.
		"one more": {Report{Pushed: 7, Interval: 30 * ms}, Report{Pushed: 6, Interval: 120 * ms}, 4},
		"equal":    {Report{Pushed: 6, Interval: 30 * ms}, Report{Pushed: 6, Interval: 120 * ms}, 3},
		"new":      {Report{Pushed: 9}, Report{Pushed: 6, Interval: 120 * ms}, 3},
	} {
		if got := r.staleness([]Report{c.slow, c.fast, c.slow}); got != c.want {
			t.Errorf("%s: s = %d, want %d", name, got, c.want)
		}
	}
	if got := r.Tune(nil); got != (Within{3}) {
		t.Errorf("without workers: %v", got)
	}
}

// The predicted wait is that of a machine under the soft barrier: the fastest worker goes on until its pull is parked.
func TestDSPSPredictsWhereTheMachineParks(t *testing.T) {
	for s := range uint64(6) {
		m, err := New(Config{Live: rankset.Range(2), Model: SSP(s), Parking: SoftBarrier, Dataflow: Accumulate})
		if err != nil {
			t.Fatal(err)
		}
		m.Step(Push(1, 0, 0), nil)
		pushes := uint64(0)
		for parked := false; !parked; pushes++ {
			m.Step(Push(0, pushes, 0), nil)
			parked = m.Step(Pull(0, pushes), nil)[0].Kind == Park
		}
		// The fastest pushes every 10 ms; the slowest's next push comes with that whose pull is parked.
		slow := Report{Pushed: 1, Interval: time.Duration(pushes-1) * 10 * ms}
		if got := (Range{0, 9}).staleness([]Report{slow, {Pushed: 2, At: 10 * ms, Interval: 10 * ms}}); got != s {
			t.Errorf("s = %d for a worker that parks after %d pushes, want %d", got, pushes, s)
		}
	}
}

func TestDSPSStaysInItsRange(t *testing.T) {
	for interval := time.Duration(1); interval < 200; interval++ {
		s := Range{2, 7}.staleness([]Report{{Pushed: 50, At: 17, Interval: interval}, {Pushed: 48, Interval: 100}})
		if s < 2 || s > 7 {
			t.Fatalf("interval %d: s = %d", interval, s)
		}
	}
}

// The adaptive paper, section III: a barrier is due when the fastest leads by s, or the slowest has done w.
func TestAdaptiveBarrierIsDueByEitherThreshold(t *testing.T) {
	a := Adaptive{S: 3, W: 5}
	for _, c := range []struct {
		slowest, fastest uint64
		due              bool
	}{
		{0, 0, false}, {0, 2, false}, {0, 3, true}, {4, 4, false}, {5, 5, true}, {4, 6, false}, {4, 7, true},
	} {
		if got := a.Due(c.slowest, c.fastest); got != c.due {
			t.Errorf("%d to %d: due %v, want %v", c.slowest, c.fastest, got, c.due)
		}
	}
}

// The adaptive paper, section III: s rises with the spread of the nodes' speeds or CPU occupancies and falls
// when they are alike.
func TestAdaptiveThresholdsFollowTheSpread(t *testing.T) {
	base := Adaptive{S: 3, W: 2}
	for name, c := range map[string]struct {
		reports []Report
		want    Adaptive
	}{
		"unknown":    {nil, Adaptive{3, 2}},
		"alike":      {[]Report{{Interval: 100 * ms, Occupancy: 0.5}, {Interval: 100 * ms, Occupancy: 0.5}}, Adaptive{3, 2}},
		"slow node":  {[]Report{{Interval: 100 * ms}, {Interval: 300 * ms}, {Interval: 110 * ms}}, Adaptive{9, 6}},
		"busy node":  {[]Report{{Interval: 100 * ms, Occupancy: 0.5}, {Interval: 100 * ms, Occupancy: 1}}, Adaptive{5, 3}},
		"new worker": {[]Report{{Interval: 100 * ms}, {}}, Adaptive{3, 2}},
		"very slow":  {[]Report{{Interval: 1}, {Interval: time.Hour}}, Adaptive{MaxLead - 1, MaxLead - 1}},
	} {
		if got := base.Thresholds(strides(c.reports)); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func strides(reports []Report) (live []Stride) {
	for _, r := range reports {
		live = append(live, Stride{Report: r})
	}
	return live
}

// The rule against fixed thresholds (the paper's test: a program on one node slows it in mid-run):
// among equals it is as strict, with a slow node the others work instead of waiting.
func TestAdaptiveRuleAgainstFixedThresholds(t *testing.T) {
	alike := []time.Duration{100 * ms, 103 * ms, 98 * ms, 101 * ms}
	slowed := []time.Duration{100 * ms, 303 * ms, 98 * ms, 101 * ms}
	base := Adaptive{S: 1, W: 1}
	work := func(a Adaptive, intervals []time.Duration) float64 { w, _ := superstep(a, intervals); return w }
	var reports [2][]Report
	for i := range alike {
		reports[0] = append(reports[0], Report{Interval: alike[i]})
		reports[1] = append(reports[1], Report{Interval: slowed[i]})
	}
	if got := base.Thresholds(strides(reports[0])); got != base {
		t.Errorf("among equals: %v", got)
	}
	adaptive := base.Thresholds(strides(reports[1]))
	if got, fixed := work(adaptive, slowed), work(base, slowed); got < 1.4*fixed {
		t.Errorf("with a slow node %v does %.2f of the work that would be possible, fixed %v %.2f", adaptive, got, base, fixed)
	}
	_, lead := superstep(adaptive, slowed)
	if lead > adaptive.S+1 {
		t.Errorf("lead %d under %v", lead, adaptive)
	}
}

// superstep runs workers from one barrier to the next in virtual time: the part of the time in which
// they work, on average, and the greatest lead.
func superstep(a Adaptive, intervals []time.Duration) (work float64, lead uint64) {
	done := make([]uint64, len(intervals))
	next := append([]time.Duration(nil), intervals...)
	first := 0
	for !a.Due(slices.Min(done), slices.Max(done)) {
		first = 0
		for r := range next {
			if next[r] < next[first] {
				first = r
			}
		}
		done[first]++
		next[first] += intervals[first]
	}
	var barrier, sum time.Duration  // each finishes the iteration that it is in
	next[first] -= intervals[first] // but for the one that has made it due
	for r := range next {
		barrier = max(barrier, next[r])
		sum += next[r]
		if r != first {
			done[r]++
		}
	}
	for r := range done {
		for q := range done {
			lead = max(lead, done[r]-min(done[r], done[q]))
		}
	}
	return float64(sum) / float64(barrier) / float64(len(next)), lead
}

// What a rank waits for its answers is no work, and a rank that has left is forgotten.
func TestTuningMeasuresIntervalsWithoutWaits(t *testing.T) {
	tuning := NewTuning(DSPS(3, 15))
	for i := range uint64(7) { // rank 1 pushes every 100 ms
		tuning.Pushed(1, i, time.Duration(i)*100*ms)
	}
	for i := range uint64(10) { // rank 0 takes 40 and waits 20
		at := 600*ms - time.Duration(9-i)*60*ms
		tuning.Pushed(0, i, at)
		if i < 9 {
			tuning.Freed(0, at+20*ms)
		}
	}
	// Three more pushes, and ends at 40, 80, … against pushes at 100, 200, …: see "next push" above.
	if pull, changed := tuning.Tune(); pull != (Within{7}) || !changed {
		t.Errorf("%v, changed %t", pull, changed)
	}
	if pull, changed := tuning.Tune(); pull != (Within{7}) || changed || tuning.Pull() != pull {
		t.Errorf("once more %v, changed %t", pull, changed)
	}
	tuning.Live(rankset.Of(1))
	if pull, changed := tuning.Tune(); pull != (Within{3}) || !changed {
		t.Errorf("alone %v, changed %t", pull, changed)
	}
}
