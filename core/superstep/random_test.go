package superstep_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomSchedules drives a decider and its workers through frames that are late and overtake each other, ranks
// that are excused, leave, pause and come late, while the decider may be lost, or another take its place. Invariants:
//
//  1. Every live rank ends every superstep once, and no barrier falls without it: when no frame is under way, as many have
//     fallen as the decider says that all live ranks have ended. One that took the place of another may be
//     off by one: a rank can be answered by both.
//  2. Nobody waits for ever: not for a rank that was excused or has left, nor for an answer.
//  3. Under adaptive:S,W among equals no rank that was not excused leads another by more than S iterations.
//
// More: go test ./core/superstep -run RandomSchedules -schedules 1000000.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 2000, func(seed uint64) error { return newSchedule(seed).run() })
}

// schedule is a job of a few ranks, whose barriers are those of a value's machine.
type schedule struct {
	rng      *rand.Rand
	now      time.Duration
	model    string
	parsed   condition.Model
	bound    uint64 // on the lead among equals; 0 for none
	alike    bool   // nothing makes ranks differ
	decider  *superstep.Decider
	number   int // of the decider
	live     rankset.Set
	ranks    []actor
	frames   []func() error // under way, to arrive in any order
	barriers uint64         // that have fallen
}

// actor is a rank: it computes, waits for an answer, or waits at the barrier.
type actor struct {
	*superstep.Worker
	interval time.Duration
	began    time.Duration
	asks     bool
	barrier  bool
	pushed   uint64 // supersteps that it has ended: counted by the barrier
	excused  bool   // from this superstep or the one before
	at       int    // the number of the decider that it is with: what it says goes there
}

func newSchedule(seed uint64) *schedule {
	rng := rand.New(rand.NewPCG(seed, 3))
	s := &schedule{rng: rng, alike: rng.IntN(2) == 0, live: rankset.Range(1 + rng.IntN(5))}
	switch rng.IntN(2) {
	case 0:
		s.bound = uint64(1 + rng.IntN(4))
		s.model = fmt.Sprintf("adaptive:%d,%d", s.bound, 1+rng.IntN(4))
	default:
		s.model = fmt.Sprintf("elastic:%d", 1+rng.IntN(8))
	}
	m, err := condition.Parse(s.model)
	if err != nil {
		panic(err)
	}
	s.parsed, s.decider = m, superstep.NewDecider(m.Supersteps, s.live)
	for rank := range s.live.Len() {
		a := actor{Worker: superstep.NewWorker(m.Supersteps, rank), interval: 10 * time.Millisecond}
		if !s.alike {
			a.interval += time.Duration(rng.IntN(40)) * time.Millisecond
		}
		a.Begin(0)
		s.ranks = append(s.ranks, a)
	}
	return s
}

// run goes on until enough barriers have fallen. Every step something that can happen does.
func (s *schedule) run() error {
	for steps := 0; s.barriers < 12; steps++ {
		if steps > 20_000 {
			return fmt.Errorf("%s: %d barriers after %d steps; superstep %d, ranks %+v", s.model, s.barriers, steps, s.decider.Superstep(), s.ranks)
		}
		s.now += time.Duration(s.rng.IntN(3)) * time.Millisecond
		rank := s.live.Ranks()[s.rng.IntN(s.live.Len())]
		a := &s.ranks[rank]
		var err error
		switch k := s.rng.IntN(61); {
		case k < 30 && len(s.frames) > 0:
			i := s.rng.IntN(len(s.frames))
			f := s.frames[i]
			s.frames = append(s.frames[:i], s.frames[i+1:]...)
			err = f()
		case k < 56:
			s.end(a)
		case k < 58 && a.Stopping():
			s.excuse(a)
		case k == 58 && s.live.Len() > 1 && s.rng.IntN(20) == 0:
			s.live = s.live.Clone()
			s.live.Remove(rank)
			err = s.tell(s.decider.Live(s.live))
		case k == 59:
			a.Begin(s.now) // a pause before the iteration
		case k == 60 && s.rng.IntN(3) == 0:
			s.replace(s.rng.IntN(2) == 0)
		}
		if err == nil {
			err = s.fall()
		}
		if err == nil {
			err = s.lead()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", s.model, err)
		}
	}
	return nil
}

// replace puts another decider in the place of one that is lost, with all that was under way to it and from it, or whose value has been moved. Each rank says where it is
// when it hears of that; until then nothing that it says reaches anybody.
func (s *schedule) replace(lost bool) {
	s.decider = superstep.NewDecider(s.parsed.Supersteps, s.live)
	s.number++
	if lost {
		s.frames = nil
	}
	number := s.number
	for _, rank := range s.live.Ranks() {
		s.frames = append(s.frames, func() error {
			a := &s.ranks[rank]
			a.at = max(a.at, number)
			again := a.Again()
			if s.rng.IntN(2) == 0 { // what it says of its newest iteration may come after that
				s.say(a, again)
			}
			s.say(a, again)
			return nil
		})
	}
}

// say puts a rank's report under way.
func (s *schedule) say(a *actor, report superstep.Report) {
	to := a.at
	s.frames = append(s.frames, func() error {
		if to != s.number {
			return nil
		}
		return s.tell(s.decider.Hear(report, s.now))
	})
}

// end ends an iteration of a rank that computes.
func (s *schedule) end(a *actor) {
	if a.asks || a.barrier {
		return
	}
	at := s.now
	if s.alike { // the measured interval is the same for all, whatever the schedule
		at = a.began + a.interval
		a.Begin(a.began)
	}
	report, verdict := a.End(at)
	a.asks = verdict == superstep.Asked
	s.proceed(a, verdict)
	s.say(a, report)
}

// proceed has a rank do what a verdict says.
func (s *schedule) proceed(a *actor, verdict superstep.Verdict) {
	switch verdict {
	case superstep.WasLast:
		a.barrier, a.excused = true, false
		a.pushed++
	case superstep.GoesOn:
		a.Begin(s.now)
		a.began = s.now
	}
}

// excuse ends a rank's superstep without it.
func (s *schedule) excuse(a *actor) {
	report := a.Excuse()
	a.pushed++
	a.excused = true
	s.say(a, report)
}

// tell puts the decider's words under way.
func (s *schedule) tell(out superstep.Outputs) error {
	for _, stop := range out.Stops {
		s.frames = append(s.frames, func() error {
			a := &s.ranks[stop.Rank]
			verdict := a.Stop(stop, s.now)
			if verdict == superstep.None {
				return nil
			}
			if !a.asks {
				return fmt.Errorf("rank %d got the answer %q and had not asked", stop.Rank, verdict)
			}
			a.asks = false
			s.proceed(a, verdict)
			return nil
		})
	}
	return nil
}

// fall lets those go on who wait at a barrier that every live rank has come to.
func (s *schedule) fall() error {
	for _, rank := range s.live.Ranks() {
		if s.ranks[rank].pushed > s.barriers {
			continue
		}
		n, off := s.decider.Superstep(), uint64(min(s.number, 1))
		if len(s.frames) == 0 && (n+off < s.barriers || n > s.barriers+off) {
			return fmt.Errorf("%d barriers have fallen, and the decider is in superstep %d", s.barriers, s.decider.Superstep())
		}
		return nil
	}
	s.barriers++
	for i := range s.ranks {
		if a := &s.ranks[i]; a.barrier && a.pushed <= s.barriers {
			a.barrier = false
			a.Begin(s.now)
			a.began = s.now
		}
	}
	return nil
}

// lead holds the ranks of a superstep against the bound.
func (s *schedule) lead() error {
	if s.bound == 0 || !s.alike {
		return nil
	}
	for _, q := range s.live.Ranks() {
		for _, r := range s.live.Ranks() {
			fast, slow := &s.ranks[q], &s.ranks[r]
			if fast.Superstep() != slow.Superstep() || fast.excused || slow.excused {
				continue
			}
			if fast.Iterations() > slow.Iterations()+s.bound {
				return fmt.Errorf("rank %d leads rank %d by %d iterations in superstep %d", q, r, fast.Iterations()-slow.Iterations(), fast.Superstep())
			}
		}
	}
	return nil
}

// A rank may wait at a barrier that a lost decider has decided on, for another that has not heard of it and does nothing: the next decider tells that one.
func TestTheNextDeciderTellsWhoHasNotHeardOfABarrier(t *testing.T) {
	for _, setting := range []string{"adaptive:3,3", "elastic:15"} {
		m, err := condition.Parse(setting)
		if err != nil {
			t.Fatal(err)
		}
		d := superstep.NewDecider(m.Supersteps, rankset.Range(2))
		d.Hear(superstep.Report{Rank: 1, Superstep: 5, Iteration: 1}, 0)
		out := d.Hear(superstep.Report{Rank: 0, Superstep: 6}, time.Millisecond)
		if len(out.Stops) != 1 || out.Stops[0].Rank != 1 || out.Stops[0].Superstep != 5 || out.Stops[0].Iteration != 2 {
			t.Errorf("%s: %+v, want that superstep 5 ends with rank 1's iteration 2", setting, out.Stops)
		}
	}
}

// A rank's word to a new decider comes in the middle of an iteration: the plan takes that iteration for as long as the rank says it was.
func TestAPlanAfterTheDecidersLossTakesIterationsForWhole(t *testing.T) {
	plan(t, []superstep.Report{
		{Rank: 0, Iteration: 3, Interval: time.Second}, {Rank: 1, Iteration: 3, Interval: time.Second},
		{Rank: 0, Iteration: 4, Interval: time.Second}, {Rank: 1, Iteration: 4, Interval: time.Second},
	}, []time.Duration{0, 0, time.Millisecond, 500 * time.Millisecond}, 5, 5)
}

// A report that comes after the next one counts for nothing, and what went by between those that count were two iterations.
func TestAPlanDividesTheTimeOfReportsThatWereOvertaken(t *testing.T) {
	plan(t, []superstep.Report{
		{Rank: 0, Iteration: 1}, {Rank: 1, Iteration: 1}, {Rank: 0, Iteration: 3}, {Rank: 0, Iteration: 2}, {Rank: 1, Iteration: 2},
	}, []time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond, 200 * time.Millisecond, 200 * time.Millisecond}, 4, 3)
}

// plan hears reports at their times, and wants the last of them to lead to these ends of two ranks.
func plan(t *testing.T, reports []superstep.Report, at []time.Duration, ends ...uint64) {
	t.Helper()
	m, err := condition.Parse("elastic:240")
	if err != nil {
		t.Fatal(err)
	}
	d := superstep.NewDecider(m.Supersteps, rankset.Range(2))
	var stops []superstep.Stop
	for i, r := range reports {
		stops = slices.Clone(d.Hear(r, at[i]).Stops)
	}
	if len(stops) != 2 || stops[0].Iteration != ends[0] || stops[1].Iteration != ends[1] {
		t.Errorf("%+v, want that it ends with iterations %d", stops, ends)
	}
}

// A decider allocates nothing in steady state.
func TestDeciderAllocatesNothing(t *testing.T) {
	for _, setting := range []string{"adaptive:3,3", "elastic:15"} {
		m, err := condition.Parse(setting)
		if err != nil {
			t.Fatal(err)
		}
		const n = 20
		d := superstep.NewDecider(m.Supersteps, rankset.Range(n))
		workers := make([]*superstep.Worker, n)
		for rank := range workers {
			workers[rank] = superstep.NewWorker(m.Supersteps, rank)
		}
		now := time.Duration(0)
		round := func() {
			for _, w := range workers {
				now += time.Millisecond
				r, _ := w.End(now)
				for _, s := range d.Hear(r, now).Stops {
					workers[s.Rank].Stop(s, now)
				}
			}
		}
		for range 100 {
			round()
		}
		if allocs := testing.AllocsPerRun(100, round); allocs != 0 {
			t.Errorf("%s: %v allocations in a round", setting, allocs)
		}
		if d.Superstep() < 10 {
			t.Errorf("%s: %d supersteps", setting, d.Superstep())
		}
	}
}
