package sim

import (
	"fmt"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/rankset"
)

// gate is one machine, of a key or, with a global barrier, of the scheduler, and the ledger that checks it.
//
// Invariants, checked at every step of every run:
//
//  1. A push is admitted once, or dropped because its iteration closed without it.
//  2. V rises by one with each advance, and under a push condition of a known number of workers no
//     iteration closes with fewer.
//  3. Under a model that bounds it, no worker pushes with a greater lead.
//  4. A pull is answered at once only if the pull condition holds and the push after it would be admitted, and parked only if not.
//  5. A parked pull is answered once: when V passes its progress (lazy), at the next advance (soft
//     barrier, or where it was too far ahead), or when a new condition holds for it.
//  6. When a run ends, the machine's parked pulls and its tally equal the ledger's.
type gate struct {
	machine *condition.Machine
	pull    condition.PullCondition
	parking condition.Parking
	quorum  int    // contributors that an iteration needs at least
	bound   uint64 // on the lead

	v       uint64
	filed   []uint32 // by rank: V+1 when its pull was parked, 0 while none is
	waiting int
	tally   condition.Tally

	leads, staleness sum
	out              []condition.Output
	answers          []int // ranks whose pulls the last step answered; valid until the next
}

// unbounded is the bound of models that have none.
const unbounded = ^uint64(0)

func newGate(s Scenario) (*gate, error) {
	m, err := condition.New(condition.Config{
		Live: rankset.Range(s.Workers), Model: s.Model, Parking: s.Parking, Dataflow: condition.Accumulate,
	})
	if err != nil {
		return nil, err
	}
	g := &gate{machine: m, pull: s.Model.Pull, parking: s.Parking, bound: unbounded, filed: make([]uint32, s.Workers)}
	g.quorum, _ = s.Model.Quorum(s.Workers)
	if lead, ok := s.Model.Bound(); ok {
		g.bound = lead
	}
	return g, nil
}

// exchange is a worker's push of an iteration and the pull that travels with it. The answers that they
// release are in g.answers.
func (g *gate) exchange(rank int, progress uint64) error {
	g.answers = g.answers[:0]
	if err := g.push(rank, progress); err != nil {
		return err
	}
	g.out = g.machine.Step(condition.Pull(rank, progress), g.out[:0])
	o := g.out[0]
	if len(g.out) != 1 || o.Rank != rank || o.Progress != progress {
		return fmt.Errorf("pull of rank %d iteration %d: %v", rank, progress, g.out)
	}
	holds, known := g.holds(rank, progress)
	switch {
	case g.filed[rank] != 0:
		return fmt.Errorf("rank %d pulls iteration %d while another pull of it is parked", rank, progress)
	case o.Kind == condition.Answer && (holds || !known):
		g.answer(rank, progress)
	case o.Kind == condition.Park && (!holds || !known):
		g.filed[rank] = uint32(g.v) + 1
		g.waiting++
		g.tally.Delayed++
	default:
		return fmt.Errorf("pull of rank %d iteration %d: %v, though %q is %t with V at %d", rank, progress, o, g.pull, holds, g.v)
	}
	return nil
}

func (g *gate) push(rank int, progress uint64) error {
	lead := progress - min(progress, g.v)
	if lead > g.bound {
		return fmt.Errorf("rank %d pushes iteration %d with V at %d: a lead of %d, the bound is %d", rank, progress, g.v, lead, g.bound)
	}
	g.leads.add(lead)
	g.out = g.machine.Step(condition.Push(rank, progress, 0), g.out[:0])
	o := g.out[0]
	switch {
	case o.Rank != rank || o.Progress != progress:
		return fmt.Errorf("push of rank %d iteration %d: %v", rank, progress, o)
	case o.Kind == condition.Admit && progress >= g.v:
		g.tally.Admitted++
	case o.Kind == condition.Drop && progress < g.v:
		g.tally.Dropped++
	default:
		return fmt.Errorf("push of rank %d iteration %d with V at %d: %v", rank, progress, g.v, o)
	}
	return g.book(g.out[1:], false)
}

// setPull changes the pull condition.
func (g *gate) setPull(c condition.PullCondition) error {
	g.answers = g.answers[:0]
	g.pull = c
	g.out = g.machine.Step(condition.SetPull(c), g.out[:0])
	return g.book(g.out, true)
}

// book enters advances and answers of parked pulls; changed reports a changed condition.
func (g *gate) book(out []condition.Output, changed bool) error {
	for _, o := range out {
		switch o.Kind {
		case condition.Advance:
			if o.Progress != g.v || o.Contributors.Len() < g.quorum {
				return fmt.Errorf("%v, with V at %d and %d contributors of %d", o, g.v, o.Contributors.Len(), g.quorum)
			}
			g.v++
		case condition.Answer:
			if err := g.release(o, changed); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unexpected: %v", o)
		}
	}
	return nil
}

// release enters the answer of a parked pull.
func (g *gate) release(o condition.Output, changed bool) error {
	filed := uint64(g.filed[o.Rank])
	if filed == 0 {
		return fmt.Errorf("%v, which has no pull parked", o)
	}
	due := g.v > o.Progress
	if g.parking == condition.SoftBarrier || tooFar(o.Progress, filed-1) {
		due = g.v == filed
	}
	if !due && changed {
		holds, known := g.holds(o.Rank, o.Progress)
		due = holds || !known
	}
	if !due {
		return fmt.Errorf("%v with V at %d, parked when V was %d in %v order", o, g.v, filed-1, g.parking)
	}
	g.filed[o.Rank] = 0
	g.waiting--
	g.answer(o.Rank, o.Progress)
	return nil
}

func (g *gate) answer(rank int, progress uint64) {
	g.staleness.add(progress + 1 - min(progress+1, g.v))
	g.answers = append(g.answers, rank)
}

// tooFar reports whether the push after a pull of this progress would be refused, whatever the condition.
func tooFar(progress, v uint64) bool { return progress >= v+condition.MaxLead-1 }

// holds evaluates the pull condition. One that is not Narrow may need more than the ledger, which has no sets of
// ranks: then the result is unknown.
func (g *gate) holds(rank int, progress uint64) (holds, known bool) {
	if tooFar(progress, g.v) {
		return false, true
	}
	if c, ok := g.pull.(condition.Narrow); ok && c.Narrow() {
		return g.pull.Holds(condition.View{Rank: rank, Progress: progress, V: g.v}), true
	}
	return false, false
}

// end checks the invariants at the run's end; idle reports that no worker waits any more.
func (g *gate) end(idle bool) error {
	if g.waiting != g.machine.Parked() || idle && g.waiting > 0 {
		return fmt.Errorf("%d pulls wait, the machine has %d parked, and every worker is done: %t", g.waiting, g.machine.Parked(), idle)
	}
	if got := g.machine.Tally(); got != g.tally {
		return fmt.Errorf("the machine counts %+v, right is %+v", got, g.tally)
	}
	return nil
}

// sum accumulates a mean and a maximum.
type sum struct {
	total float64
	n     float64
	most  uint64
}

func (s *sum) add(v uint64) {
	s.total += float64(v)
	s.n++
	s.most = max(s.most, v)
}

func (s *sum) merge(t sum) {
	s.total += t.total
	s.n += t.n
	s.most = max(s.most, t.most)
}

func (s *sum) mean() float64 { return s.total / max(1, s.n) }
