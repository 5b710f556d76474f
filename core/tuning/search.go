package tuning

import "slices"

// Names of the first and the last phase.
const (
	WarmUp = "warm-up"
	Ended  = "end"
)

// Search is the search of one job. The zero Search is not ready for use; New makes one.
//
// Invariants:
//
//  1. What At has answered for a step it answers ever after, so that a name that is used less often than others follows.
//  2. At every step, every rank has the same answer, or has to wait for Decide.
type Search struct {
	cfg     Config
	best    Point
	phases  []phase // that have begun, the last of them runs
	axis    int     // the next to search
	speedup float64 // of the winner of the final
}

// phase is trials in a row.
type phase struct {
	name       string
	from       uint64 // its first step
	candidates []Point
	trials     []int // indexes of candidates; empty for the end, which has one candidate and no last step
}

// New begins a search.
func New(c Config) *Search {
	c.Steps = max(c.Steps, 1)
	s := &Search{cfg: c, best: c.Start}
	s.phases = []phase{{name: WarmUp, candidates: []Point{c.Start}, trials: make([]int, max(c.Warmup, 1))}}
	return s
}

func (s *Search) running() *phase { return &s.phases[len(s.phases)-1] }

// Over reports whether the search has ended.
func (s *Search) Over() bool { return len(s.running().trials) == 0 }

// Best is the best point so far; once the search is over, the one to keep.
func (s *Search) Best() Point { return s.best }

// Speedup is the rate of the best point by that of the job's own settings, as the final has measured it; 1 where these
// were kept.
func (s *Search) Speedup() float64 {
	if s.speedup == 0 {
		return 1
	}
	return s.speedup
}

// Phase names the running phase.
func (s *Search) Phase() string { return s.running().name }

// Trials are the points of the running phase's trials.
func (s *Search) Trials() (points []Point) {
	p := s.running()
	for _, c := range p.trials {
		points = append(points, p.candidates[c])
	}
	return points
}

// End is the step with which the running phase has been measured, and from which on Decide may be called.
func (s *Search) End() uint64 {
	p := s.running()
	return p.from + uint64(len(p.trials)*s.cfg.Steps)
}

// At is the point of a step. It is not known yet for the phases after the running one.
func (s *Search) At(step uint64) (p Point, known bool) {
	if !s.Over() && step >= s.End()+Gap {
		return Point{}, false
	}
	i := len(s.phases) - 1
	for s.phases[i].from > step {
		i--
	}
	in := &s.phases[i]
	if len(in.trials) == 0 {
		return in.candidates[0], true
	}
	trial := min(int(step-in.from)/s.cfg.Steps, len(in.trials)-1)
	return in.candidates[in.trials[trial]], true
}

// Trial is the trial of the running phase that a step is in, and the step's number in the trial; false for a step in none.
func (s *Search) Trial(step uint64) (trial, within int, in bool) {
	p := s.running()
	if step < p.from || step >= s.End() || s.Over() {
		return 0, 0, false
	}
	n := int(step - p.from)
	return n / s.cfg.Steps, n % s.cfg.Steps, true
}

// Decide ends the running phase with the rate that each of its trials had, 0 for one that was not measured, and begins
// the next.
func (s *Search) Decide(rates []float64) {
	p := s.running()
	from := s.End() + Gap
	winner, by := p.winner(rates)
	if p.name == "final" {
		if winner == 0 {
			s.best = s.cfg.Start
		} else {
			s.speedup = by
		}
		s.end(from)
		return
	}
	s.best = p.candidates[winner]
	for s.axis < len(axes) {
		a := &axes[s.axis]
		s.axis++
		candidates := a.candidates(s.best)
		if len(candidates) > 1 && !(a.name == "partition" && s.cfg.KeepCut) {
			s.begin(phase{name: a.name, from: from, candidates: candidates}, repeats)
			return
		}
	}
	if s.best == s.cfg.Start {
		s.end(from)
		return
	}
	s.begin(phase{name: "final", from: from, candidates: []Point{s.cfg.Start, s.best}}, finals)
}

// begin begins a phase in which each candidate is tried so many times, forwards and backwards in turn.
func (s *Search) begin(p phase, times int) {
	for round := range times {
		order := make([]int, len(p.candidates))
		for i := range order {
			order[i] = i
		}
		if round%2 == 1 {
			slices.Reverse(order)
		}
		p.trials = append(p.trials, order...)
	}
	s.phases = append(s.phases, p)
}

func (s *Search) end(from uint64) {
	s.phases = append(s.phases, phase{name: Ended, from: from, candidates: []Point{s.best}})
}

// winner is the candidate that is better than the first and of those the fastest, with the ratio of their rates.
// Without one, it is the first.
func (p *phase) winner(rates []float64) (winner int, by float64) {
	by = 1
	n := len(p.candidates)
	for c := 1; c < n; c++ {
		var ratios []float64
		for round := 0; round+n <= len(rates) && round+n <= len(p.trials); round += n {
			of := func(candidate int) float64 { return rates[round+slices.Index(p.trials[round:round+n], candidate)] }
			if of(0) > 0 && of(c) > 0 {
				ratios = append(ratios, of(c)/of(0))
			}
		}
		if len(ratios) == len(p.trials)/n && better(ratios) && median(ratios) > by {
			winner, by = c, median(ratios)
		}
	}
	return winner, by
}
