package barrier

import (
	"time"

	"github.com/paceline/paceline/internal/rankset"
)

// Plan says where the superstep that is running ends.
type Plan struct {
	Superstep uint64
	Choice
	Stops []Stop // by rank
}

// Stop is where a worker's superstep ends: its iteration of that number, counted from 1 since the last
// barrier, is the last that it does before it waits. A worker that hears of it too late stops at the
// end of the iteration that it is in.
type Stop struct {
	Rank      int
	Iteration uint64
}

// pushesToPlan is how many pushes of each worker since the last barrier come before a plan: two make an
// interval, and the wait at the barrier lies before the first.
const pushesToPlan = 2

// Planner decides ElasticBSP's barriers for a job: monitor, predict, choose (algorithms.md section 5).
// It is a pure machine. Its owner tells it what each worker pushes, and tells the workers what it plans;
// when all live ones have pushed the last iteration of their superstep, the next one begins. A wrong
// prediction makes workers wait longer at one barrier and does no other harm.
type Planner struct {
	predictions int
	live        rankset.Set
	n           int      // live.Len()
	workers     []worker // by rank
	ready       int      // live ranks that have pushed enough for a plan
	waiting     int      // live ranks that have ended their superstep
	superstep   uint64
	plan        *Plan // of the superstep that is running, once it is made

	search Search
	ends   [][]time.Duration
	buffer []time.Duration
}

// worker is what the monitor knows of one since the last barrier.
type worker struct {
	pushes   uint64
	last     time.Duration // of the newest push
	interval time.Duration // between the newest two
	waits    bool          // it has pushed its last iteration
}

// NewPlanner makes the planner of a job that begins with these ranks and looks a number of iterations
// of each, at least 1, ahead.
func NewPlanner(live rankset.Set, predictions int) *Planner {
	p := &Planner{predictions: max(predictions, 1)}
	p.setLive(live)
	return p
}

// Superstep is the number of barriers that have fallen.
func (p *Planner) Superstep() uint64 { return p.superstep }

// Push is a push of a rank at a moment that all calls count from the same origin; last says that the
// rank ends its superstep with it. If that makes a plan possible, it comes back.
func (p *Planner) Push(rank int, at time.Duration, last bool) (Plan, bool) {
	if !p.live.Has(rank) {
		return Plan{}, false
	}
	w := &p.workers[rank]
	if w.pushes > 0 {
		w.interval = max(at-w.last, 1)
	}
	w.pushes++
	w.last = at
	if w.pushes == pushesToPlan {
		p.ready++
	}
	if last && !w.waits {
		w.waits = true
		p.waiting++
	}
	return p.proceed()
}

// Live changes the membership. A rank that goes leaves the computation; one that comes while a plan is
// there already ends its superstep with its first iteration, and the plan that comes back is for those.
func (p *Planner) Live(live rankset.Set) (Plan, bool) {
	came := live.Minus(p.live)
	p.setLive(live)
	if p.plan == nil || came.Len() == 0 {
		return p.proceed()
	}
	late := Plan{Superstep: p.superstep, Choice: p.plan.Choice}
	for _, r := range came.Ranks() {
		late.Stops = append(late.Stops, Stop{Rank: r, Iteration: 1})
	}
	return late, true
}

func (p *Planner) setLive(live rankset.Set) {
	p.ready, p.waiting = 0, 0
	for _, r := range live.Ranks() {
		for len(p.workers) <= r {
			p.workers = append(p.workers, worker{})
		}
		if !p.live.Has(r) {
			p.workers[r] = worker{}
		}
		if p.workers[r].pushes >= pushesToPlan {
			p.ready++
		}
		if p.workers[r].waits {
			p.waiting++
		}
	}
	p.live, p.n = live.Clone(), live.Len()
}

// proceed goes on to the next superstep when all wait, and plans when all have pushed enough.
func (p *Planner) proceed() (Plan, bool) {
	switch {
	case p.n == 0:
	case p.waiting == p.n:
		p.superstep++
		p.plan = nil
		p.ready, p.waiting = 0, 0
		clear(p.workers)
	case p.plan == nil && p.ready == p.n:
		return p.choose(p.live.Ranks())
	}
	return Plan{}, false
}

// choose predicts and plans.
func (p *Planner) choose(ranks []int) (Plan, bool) {
	p.ends, p.buffer = p.ends[:0], p.buffer[:0]
	for _, r := range ranks {
		w := p.workers[r]
		from := len(p.buffer)
		p.buffer = Predict(p.buffer, w.last, w.interval, p.predictions)
		p.ends = append(p.ends, p.buffer[from:])
	}
	choice, ok := p.search.ZipLine(p.ends)
	if !ok {
		return Plan{}, false
	}
	p.plan = &Plan{Superstep: p.superstep, Choice: choice}
	for k, r := range ranks {
		iteration := p.workers[r].pushes + uint64(choice.Index(p.ends[k])) + 1
		p.plan.Stops = append(p.plan.Stops, Stop{Rank: r, Iteration: iteration})
	}
	return *p.plan, true
}

// Predict appends the ends of a worker's next iterations, n of them, if they take as long as the last.
func Predict(ends []time.Duration, last, interval time.Duration, n int) []time.Duration {
	for range n {
		last += interval
		ends = append(ends, last)
	}
	return ends
}
