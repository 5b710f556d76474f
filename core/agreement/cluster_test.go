package agreement

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/schedules"
	"github.com/paceline/paceline/internal/units"
)

// TestRandomSchedules has workers' halves and a home speak over connections of random delay: ranks that bring different
// things, come late, give up, join or leave. However it goes, every operation ends on every rank that started it, each
// rank is told of a failure once, a failure leaves what was started in its knowledge alone, nothing stays behind, and
// the name can be used again.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 3000, runCluster)
}

// operation is one rank's use of the name.
type operation struct {
	count   uint64
	t       *Tensor // nil where it failed before it began
	iter    uint64  // of the tensor, as this rank counts: the servers sum what has the same
	sent    bool    // its arrival has left the rank
	cancels bool
	ended   bool
	err     error
}

// frame is on its way, to the home or from it.
type frame struct {
	o      *operation // arrival, or cancel for why
	cancel bool
	why    Why
	never  bool     // it is a cancel of what was not declared
	failed *Failure // to a rank: a failure, or the result of a count
	count  uint64
	join   bool
	bye    bool
	joined bool // to a rank: all have joined
}

type worker struct {
	rank    int
	uses    Uses[*operation, *Tensor]
	iters   map[*Tensor]uint64 // iterations begun
	epoch   uint32
	ops     []*operation // of this epoch
	out, in []frame
	left    int // operations that it will start
	over    bool
	told    map[uint64]int
}

type cluster struct {
	rng     *rand.Rand
	home    *Home
	all     rankset.Set
	workers []*worker
	tensors map[string]*Tensor
	came    map[uint64]rankset.Set // ranks that went on, by count, until the result
	failed  map[uint64]bool
	refused map[[2]uint64]int // arrivals at what had failed, by rank and count
	now     time.Duration
	odd     float64 // share of operations that differ
	ending  ending
	notes   []string // what happened, for transcripts
}

func runCluster(seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 7))
	c := newCluster(2+rng.IntN(3), Config{StallWarning: 5, StallShutdown: time.Duration(rng.IntN(2) * 400)})
	c.rng, c.odd = rng, []float64{0, 0.1, 0.5}[rng.IntN(3)]
	for epoch := range uint32(1 + rng.IntN(3)) {
		c.begin(epoch)
		c.ending = ending(rng.IntN(3))
		most := 3 + rng.IntN(8)
		for _, w := range c.workers {
			w.left = most
			if c.ending != stay {
				w.left = 1 + rng.IntN(most)
			}
		}
		for c.step() {
		}
		if err := c.settled(); err != nil {
			return err
		}
		switch {
		case c.ending == stay:
			return c.again()
		case c.workers[0].epoch != epoch+1: // some have shut down
			return nil
		}
	}
	return nil
}

// ending is what ranks do when they have started their last operation.
type ending int

const (
	stay ending = iota
	join
	joinOrLeave
)

func newCluster(n int, config Config) *cluster {
	c := &cluster{all: rankset.Range(n), tensors: map[string]*Tensor{}}
	config.All = c.all
	c.home = NewHome(config)
	for rank := range n {
		c.workers = append(c.workers, &worker{rank: rank})
	}
	return c
}

func (c *cluster) begin(epoch uint32) {
	c.came, c.failed, c.refused = map[uint64]rankset.Set{}, map[uint64]bool{}, map[[2]uint64]int{}
	for _, w := range c.workers {
		w.out, w.in = nil, nil
		w.uses, w.iters, w.epoch = NewUses[*operation, *Tensor](epoch), map[*Tensor]uint64{}, epoch
		w.ops, w.over, w.told = nil, false, map[uint64]int{}
	}
}

// step has something happen, if anything still can.
func (c *cluster) step() bool {
	var can []func()
	for _, w := range c.workers {
		if w.left > 0 && !w.over {
			can = append(can, func() { c.start(w) })
		}
		if c.ending != stay && w.left == 0 && !w.over && !slices.ContainsFunc(w.ops, func(o *operation) bool { return !o.ended }) {
			can = append(can, func() { c.leave(w) })
		}
		if len(w.out) > 0 {
			can = append(can, func() { c.serve(w) })
		}
		if len(w.in) > 0 {
			can = append(can, func() { c.hear(w) })
		}
	}
	if len(can) == 0 {
		return false
	}
	if c.now++; c.rng.IntN(10) == 0 {
		_, told := c.home.Tick(c.now)
		c.tell(told)
	}
	if c.rng.IntN(40) == 0 {
		c.trouble()
	}
	can[c.rng.IntN(len(can))]()
	c.results()
	return true
}

func (c *cluster) note(format string, args ...any) {
	c.notes = append(c.notes, fmt.Sprintf(format, args...))
}

// tensor declares what a rank brings, as the scheduler does: the same for all that ask for the same.
func (c *cluster) tensor(signature string, generation uint64) *Tensor {
	key := fmt.Sprint(signature, generation)
	if c.tensors[key] == nil {
		c.tensors[key] = &Tensor{ID: ID{Name: "x"}, Generation: generation, Signature: signature, Ranks: c.all}
	}
	return c.tensors[key]
}

// start begins the next operation of a rank.
func (c *cluster) start(w *worker) {
	signature := fmt.Sprint("sum of ", w.uses.Next()%2)
	if c.rng.Float64() < c.odd {
		signature = fmt.Sprint("odd ", c.rng.IntN(2))
	}
	c.bring(w, signature)
	w.left--
}

func (c *cluster) bring(w *worker, signature string) *operation {
	o := &operation{}
	w.ops = append(w.ops, o)
	if o.count, o.err = w.uses.Count(); o.err != nil {
		o.ended = true
		c.note("rank %d: %d has failed already: %v", w.rank, o.count, o.err)
		return o
	}
	o.t = c.tensor(signature, w.uses.Generation())
	o.iter = w.iters[o.t]
	w.iters[o.t]++
	c.note("rank %d begins %d, generation %d", w.rank, o.count, w.uses.Generation())
	w.uses.Begin(o.count, o, o.t)
	w.out = append(w.out, frame{o: o})
	return o
}

// leave joins or says goodbye, behind everything that the rank has sent.
func (c *cluster) leave(w *worker) {
	w.over = true
	bye := c.ending == joinOrLeave && c.rng.IntN(2) == 0
	w.out = append(w.out, frame{join: !bye, bye: bye})
}

// trouble has a rank give an operation up, or a message be broken.
func (c *cluster) trouble() {
	w := c.workers[c.rng.IntN(len(c.workers))]
	for _, o := range w.ops {
		if o.ended || o.cancels {
			continue
		}
		if c.rng.IntN(2) == 0 {
			c.giveUp(w, o, OwnWill)
		} else if o.sent {
			c.tell(c.home.Fail(o.t, o.count, units.FailUnsupported, "broken"))
		}
		return
	}
}

func (c *cluster) giveUp(w *worker, o *operation, why Why) {
	if o.ended || o.cancels {
		return
	}
	o.cancels, o.ended = true, true
	never := false
	c.note("rank %d: %d ends, %s", w.rank, o.count, map[Why]string{Heard: "as it heard", OwnWill: "by its own will"}[why])
	if !o.sent && c.rng != nil && c.rng.IntN(2) == 0 { // it has not begun to leave
		w.out = slices.DeleteFunc(w.out, func(f frame) bool { return f.o == o })
		never = why == OwnWill && c.rng.IntN(2) == 0
	}
	w.out = append(w.out, frame{o: o, cancel: true, why: why, never: never})
	if early := c.rng != nil && c.rng.IntN(2) == 0; early { // its memory is free at once
		w.uses.End(o.count)
	}
	if why == OwnWill { // what the rank begins from here on is of a new generation
		c.fails(w, o.t.Generation, o.count, errors.New("given up"))
	}
	w.uses.End(o.count)
}

// serve has the home handle the next frame of a rank.
func (c *cluster) serve(w *worker) { c.take(w, 0) }

// take is serve with a frame that may have overtaken others.
func (c *cluster) take(w *worker, at int) {
	f := w.out[at]
	w.out = slices.Delete(w.out, at, at+1)
	switch {
	case f.join:
		all, told := c.home.Join(w.rank)
		c.tell(told)
		if all {
			c.home.Reset()
			for _, w := range c.workers {
				w.in = append(w.in, frame{joined: true})
			}
		}
	case f.bye:
		c.tell(c.home.Leave(w.rank, nil))
	case f.never:
		c.tell(c.home.Undeclared(&Tensor{ID: f.o.t.ID, Generation: f.o.t.Generation, Ranks: c.all}, f.o.count, units.FailStall, "undeclared"))
	case f.cancel:
		_, told := c.home.Cancel(f.o.t, w.rank, f.o.count, f.why)
		c.tell(told)
	default:
		f.o.sent = true
		before := c.failed[f.o.count]
		proceed, told := c.home.Arrive(f.o.t, w.rank, f.o.count, c.now)
		if !proceed {
			c.note("the home refuses %d of rank %d", f.o.count, w.rank)
		}
		if before {
			c.refused[[2]uint64{uint64(w.rank), f.o.count}]++
		}
		if proceed {
			ranks := c.came[f.o.count]
			ranks.Add(w.rank)
			c.came[f.o.count] = ranks
		}
		c.tell(told)
	}
}

// tell puts failures on their way.
func (c *cluster) tell(told []Failure) {
	for _, f := range told {
		c.note("%v", f)
		if !f.OfJoin() {
			c.failed[f.Count] = true
		}
		for _, rank := range f.Ranks.Ranks() {
			w := c.workers[rank]
			w.in = append(w.in, frame{failed: &f})
		}
	}
}

// results answers what all ranks have come to with the same iteration.
func (c *cluster) results() {
	n := c.home.names[ID{Name: "x"}]
	for count, ranks := range c.came {
		if n != nil && n.window[count] != nil {
			continue
		}
		if !c.failed[count] && c.iterationsDiffer(count, ranks) {
			continue // the servers wait, for good if no failure comes
		}
		delete(c.came, count)
		if !c.failed[count] {
			c.note("all have come to %d", count)
			for _, rank := range ranks.Ranks() {
				c.workers[rank].in = append(c.workers[rank].in, frame{count: count})
			}
		}
	}
}

func (c *cluster) iterationsDiffer(count uint64, ranks rankset.Set) bool {
	iters := map[uint64]bool{}
	for _, rank := range ranks.Ranks() {
		iters[c.workers[rank].ops[count].iter] = true
	}
	return len(iters) > 1
}

// hear has a rank handle what the home told it.
func (c *cluster) hear(w *worker) {
	f := w.in[0]
	w.in = w.in[1:]
	switch {
	case f.joined:
		w.epoch++
	case f.failed == nil:
		for _, o := range w.ops {
			if o.count == f.count && !o.ended {
				o.ended = true
				c.note("rank %d: %d is done", w.rank, o.count)
				w.uses.End(o.count)
			}
		}
	case !f.failed.OfJoin():
		w.told[f.failed.Count]++
		if f.failed.Count >= w.uses.Next() {
			c.note("rank %d will not begin %d", w.rank, f.failed.Count)
		}
		c.fails(w, f.failed.Tensor.Generation, f.failed.Count, errors.New(f.failed.Text))
	}
}

// fails has a rank end what ends with an operation.
func (c *cluster) fails(w *worker, generation, count uint64, err error) {
	v := w.uses.Failed(generation, count, err)
	for _, o := range v.Failed {
		c.giveUp(w, o, Heard)
	}
	for _, o := range v.Later {
		of := o.t.Generation & (1<<joinShift - 1)
		knew := of%2 == 0 && of/2 > count // an odd one is of what begins before the failure that it knows of
		if same := len(v.Failed) > 0 && v.Failed[0].t == o.t; knew && !same {
			panic(fmt.Sprintf("the failure of %d ends %d of generation %d", count, o.count, o.t.Generation))
		}
		c.giveUp(w, o, OwnWill)
	}
}

// settled holds the end of an epoch against what is promised.
func (c *cluster) settled() error {
	for _, w := range c.workers {
		for _, o := range w.ops {
			if !o.ended {
				return fmt.Errorf("operation %d of rank %d does not end", o.count, w.rank)
			}
		}
		for count, told := range w.told {
			if again := c.refused[[2]uint64{uint64(w.rank), count}]; told > 1+again {
				return fmt.Errorf("rank %d was told %d times that %d failed, and brought it %d times afterwards", w.rank, told, count, again)
			}
		}
		if w.uses.InFlight() > 0 {
			return fmt.Errorf("rank %d keeps %d operations", w.rank, w.uses.InFlight())
		}
	}
	if left := c.home.pick(func(waiting) bool { return true }); len(left) > 0 {
		return fmt.Errorf("the home keeps %d operations, the first with count %d and ranks %v", len(left), left[0].count, left[0].a.ranks)
	}
	return nil
}

// again uses the name once more on all ranks. An operation of a generation that failed too early is the price of ranks
// that heard of a failure before they began what comes before it.
func (c *cluster) again() error {
	for range 3 {
		var ops []*operation
		for _, w := range c.workers {
			ops = append(ops, c.bring(w, "sum"))
		}
		for c.deliver() {
		}
		if !slices.ContainsFunc(ops, func(o *operation) bool { return o.err != nil || o.cancels || !o.ended }) {
			return c.settled()
		}
	}
	return errors.New("the name cannot be used any more")
}

func (c *cluster) deliver() bool {
	for _, w := range c.workers {
		if len(w.out) > 0 {
			c.serve(w)
			c.results()
			return true
		}
		if len(w.in) > 0 {
			c.hear(w)
			return true
		}
	}
	return false
}
