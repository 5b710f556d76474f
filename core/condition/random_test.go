package condition

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomSchedules drives machines under the models of schedule.model and both parking orders with random schedules
// of workers that push, pull, repeat themselves, come late, die and come back, while conditions change.
// It holds them against the ledger of ledger_test.go. A million: go test ./core/condition -run
// RandomSchedules -schedules 1000000.
func TestRandomSchedules(t *testing.T) {
	idle := sync.Pool{New: func() any { return newSchedule() }}
	schedules.Run(t, schedules.Anew(), 3000, func(seed uint64) error {
		s := idle.Get().(*schedule)
		defer idle.Put(s)
		s.run(seed)
		return nil
	})
}

func FuzzSchedules(f *testing.F) {
	for seed := range uint64(16) {
		f.Add(seed)
	}
	s := newSchedule()
	f.Fuzz(func(_ *testing.T, seed uint64) { s.run(seed) })
}

// schedule makes one random run after the other.
type schedule struct {
	rng   *rand.Rand
	pcg   *rand.PCG
	l     ledger
	exprs []Model

	n    int
	next [maxRanks]uint64 // iteration that each rank pushes next
	busy [maxRanks]bool   // an obedient rank that waits for a pull
}

func newSchedule() *schedule {
	pcg := rand.NewPCG(0, 1)
	s := &schedule{pcg: pcg, rng: rand.New(pcg)}
	for _, e := range [][2]string{
		{"lead < 2 || significance < 0.3", ""},
		{"fastest - slowest < 3 && count[progress] % 2 == 0", "count[V] >= N / 2"},
		{"false", "false"},
		{"true", "V % 2 == 0 || count[V] * 2 > N"},
	} {
		m, err := ExpressionModel(e[0], e[1])
		if err != nil {
			panic(err)
		}
		s.exprs = append(s.exprs, m)
	}
	return s
}

// run runs the schedule of a seed, and panics where a check fails.
func (s *schedule) run(seed uint64) {
	s.pcg.Seed(seed, 1)
	s.n = 1 + s.rng.IntN(maxRanks)
	s.next, s.busy = [maxRanks]uint64{}, [maxRanks]bool{}
	c := Config{Live: rankset.Range(s.n), Model: s.model(), Dataflow: Accumulate, Parking: Parking(s.rng.IntN(2))}
	if c.Model.Supersteps == nil && c.Model.Check(Aggregate) == nil && s.rng.IntN(2) == 0 {
		c.Dataflow, c.Parking = Aggregate, Lazy
	}
	s.l.start(c, s.n)
	if s.rng.IntN(2) == 0 {
		s.obedient()
	} else {
		s.chaotic()
	}
}

// model is any model with any arguments.
func (s *schedule) model() Model {
	staleness := uint64(s.rng.IntN(5))
	switch s.rng.IntN(11) {
	case 0:
		return ASP()
	case 1:
		return SSP(staleness)
	case 2:
		return DSPS(staleness, staleness+3)
	case 3:
		return DropStragglers(1 + s.rng.IntN(s.n))
	case 4:
		return PSSP(staleness, float64(s.rng.IntN(5))/4, s.rng.Uint64())
	case 5:
		return DynamicPSSP(staleness, Constant(s.rng.Float64()), s.rng.Uint64())
	case 6:
		return DynamicPSSP(staleness, Significance{}, s.rng.Uint64())
	case 7:
		return AdaptiveModel(Adaptive{1 + staleness, 1})
	case 8:
		return s.exprs[s.rng.IntN(len(s.exprs))]
	case 9:
		return ElasticModel(1 + int(staleness))
	}
	return BSP()
}

// chaotic ranks do anything at any time.
func (s *schedule) chaotic() {
	for range 60 {
		r := s.rng.IntN(s.n)
		back := s.next[r] - min(s.next[r], uint64(s.rng.IntN(3)))
		switch k := s.rng.IntN(20); {
		case k < 8:
			s.push(r, s.next[r])
			s.next[r]++
		case k < 15:
			s.l.pull(r, back)
		case k < 17:
			s.push(r, back) // again, or late, or early
		case k < 18:
			s.next[r] = max(s.next[r], s.l.v) // brought up to date
		default:
			s.change()
		}
	}
	s.l.live(all(s.n))
	for last := s.l.lastWaiting(); s.l.v <= last; {
		before := s.l.v
		for r := range s.n {
			if s.l.v == before && s.l.admitted[before]&(1<<r) == 0 {
				s.push(r, before)
			}
		}
		check(s.l.v > before, "every live rank has pushed iteration %d and it is still open", before)
	}
	check(len(s.l.waiting) == 0, "V is %d and these pulls still wait: %v", s.l.v, s.l.waiting)
}

// obedient ranks train: push, pull, wait, go on. Every such run ends, and nobody leads by more than s.
func (s *schedule) obedient() {
	for range 40 {
		if s.rng.IntN(10) == 0 {
			s.change()
		}
		s.train(min(s.rng.IntN(s.n), s.rng.IntN(s.n))) // the lower ranks are faster
	}
	s.l.live(all(s.n))
	end := s.l.v + 4
	for r := range s.n {
		end = max(end, s.next[r]+1)
	}
	for moved := true; moved; {
		moved = false
		for r := range s.n {
			moved = s.next[r] < end && s.train(r) || moved
		}
	}
	for r := range s.n {
		check(s.next[r] >= end, "rank %d is stuck at iteration %d of %d: V is %d, waiting %v", r, s.next[r], end, s.l.v, s.l.waiting)
	}
}

// train lets a rank do an iteration if it is live and has its last pull's answer.
func (s *schedule) train(r int) bool {
	if s.busy[r] && !s.l.waits(r, s.next[r]) {
		s.busy[r] = false
		s.next[r]++
	}
	if s.busy[r] || s.l.alive&(1<<r) == 0 {
		return false
	}
	if s.l.alive&(1<<r) != 0 && s.next[r] < s.l.since[r] {
		s.next[r] = s.l.since[r] // it came back and starts at the open iteration
	}
	i := s.next[r]
	check(i <= s.l.v+s.l.staleness || i < s.l.v, "rank %d is at iteration %d with V at %d: its lead is over %d", r, i, s.l.v, s.l.staleness)
	s.push(r, i)
	s.l.pull(r, i)
	s.busy[r] = true
	return true
}

func (s *schedule) push(r int, progress uint64) { s.l.push(r, progress, s.rng.Float32()) }

// change changes the membership or a condition.
func (s *schedule) change() {
	switch s.rng.IntN(4) {
	case 0:
		s.l.setPush(s.model().Push)
	case 1:
		s.l.setPull(s.model().Pull)
	case 2:
		reports := make([]Report, s.n)
		for r := range reports {
			reports[r] = Report{Rank: r, Pushed: s.next[r], At: time.Duration(s.rng.IntN(100)), Interval: time.Duration(s.rng.IntN(10))}
		}
		s.l.setPull(Range{uint64(s.rng.IntN(3)), 5}.Tune(reports))
	default:
		s.l.live(uint8(s.rng.Uint32()|s.rng.Uint32()) & all(s.n))
	}
}
