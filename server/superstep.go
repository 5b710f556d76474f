package server

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/barrier"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/wire"
)

// decider says where supersteps end, for all values that a job's ranks step together: adaptive and ElasticBSP
// (algorithms.md sections 3 and 5). It lies beside the first of these values, hears of every rank's iterations
// and tells each rank the last of its superstep. A rank that hears of it too late stops at the end of the
// iteration that it is in.
type decider struct {
	t     *tensor
	start time.Time

	mu        sync.Mutex
	planner   *barrier.Planner   // of ElasticBSP
	now       condition.Adaptive // thresholds, by the ranks' newest reports
	told      condition.Adaptive // those of the stop before, as they are logged
	live      rankset.Set
	ranks     map[int]*stride
	superstep uint64
	stopping  bool // the end of this superstep is decided
}

// stride is how far one rank is.
type stride struct {
	condition.Report
	done  uint64 // iterations in this superstep
	ended bool   // it has done its last
}

// stop is where a rank's superstep ends.
type stop struct {
	rank int
	h    wire.Header
}

// report is a rank's word that it has ended an iteration under a model with supersteps. In the frame that goes
// to the home of the first value it is for the decider.
func (r *round) report(h *wire.Header) error {
	t, err := r.tensor(h)
	if err != nil {
		return err
	}
	if !t.Held() || t.Model.Supersteps == nil {
		return fmt.Errorf("%q has no supersteps: its model is %s", t.Name, t.Model.Name)
	}
	if h.Flags&wire.FlagEmpty != 0 {
		t.endEmpty(h)
	}
	if h.Flags&wire.FlagHome != 0 {
		d := t.deciding()
		d.tell(d.hear(h))
	}
	return nil
}

// endEmpty counts for the push with which the rank would have ended its superstep.
func (t *tensor) endEmpty(h *wire.Header) {
	for _, v := range t.heldParts() {
		v.deliver(v.set(condition.Push(int(h.Rank), h.Iteration, 0)))
	}
}

// deciding finds or makes the decider beside the tensor.
func (t *tensor) deciding() *decider {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.decider != nil {
		return t.decider
	}
	d := &decider{t: t, start: time.Now(), live: t.Live(), ranks: map[int]*stride{}}
	switch rule := t.Model.Supersteps.(type) {
	case condition.Elastic:
		d.planner = barrier.NewPlanner(d.live, rule.Predictions)
	case condition.Adaptive:
		d.now, d.told = rule, rule
	}
	t.decider = d
	return d
}

// hear notes the end of an iteration. If that decides where the superstep ends, each rank's stop comes back.
func (d *decider) hear(h *wire.Header) []stop {
	d.mu.Lock()
	defer d.mu.Unlock()
	at, rank, last := time.Since(d.start), int(h.Rank), h.Flags&wire.FlagLast != 0
	if h.Iteration != d.superstep || !d.live.Has(rank) {
		return nil
	}
	s := d.ranks[rank]
	if s == nil {
		s = &stride{}
		s.Rank = rank
		d.ranks[rank] = s
	}
	if h.Flags&wire.FlagEmpty == 0 {
		s.done++
		s.Pushed, s.At, s.Occupancy = s.Pushed+1, at, float64(h.Significance)
		s.Interval = time.Duration(min(h.Aux, uint64(time.Hour)))
	}
	s.ended = s.ended || last
	d.measure()
	stops := d.decide(func() (barrier.Plan, bool) { return d.planner.Push(rank, at, last) })
	d.proceed()
	return stops
}

// decide has the model's rule say where the superstep ends, if it can now. Callers hold mu.
func (d *decider) decide(plan func() (barrier.Plan, bool)) (stops []stop) {
	if d.planner != nil {
		if p, ok := plan(); ok {
			for _, s := range p.Stops {
				stops = append(stops, d.stopAt(s.Rank, s.Iteration))
			}
		}
		return stops
	}
	ranks := d.live.Ranks()
	done := make([]uint64, len(ranks))
	for i, rank := range ranks {
		if s := d.ranks[rank]; s != nil {
			done[i] = s.done
		}
	}
	if d.stopping || !d.now.Due(done) {
		return nil
	}
	d.stopping = true
	if d.now != d.told {
		d.t.r.s.cfg.Log.Info("thresholds follow the workers", zap.String("model", d.t.Model.Name), zap.String("tensor", d.t.Name),
			zap.Uint64("superstep", d.superstep), zap.Stringer("from", d.told), zap.Stringer("to", d.now))
		d.told = d.now
	}
	for _, rank := range ranks { // at the end of the iteration that it is in
		stops = append(stops, d.stopAt(rank, 1))
	}
	return stops
}

func (d *decider) stopAt(rank int, iteration uint64) stop {
	return stop{rank, wire.Header{
		Type: wire.TypeStop, Tensor: d.t.ID, Iteration: d.superstep, Count: uint32(min(iteration, 1<<31)), Aux: wire.Thresholds(d.now.S, d.now.W),
	}}
}

// proceed begins the next superstep when all live ranks have ended this one. Callers hold mu.
func (d *decider) proceed() {
	for _, rank := range d.live.Ranks() {
		if s := d.ranks[rank]; s == nil || !s.ended {
			return
		}
	}
	d.superstep++
	d.stopping = false
	for _, s := range d.ranks {
		s.done, s.ended = 0, false
	}
}

// measure has the thresholds follow what the ranks have reported: with every report, so that one long iteration,
// such as one with a checkpoint before it, counts until that rank's next and not for a superstep as long as it
// has allowed. Callers hold mu.
func (d *decider) measure() {
	rule, ok := d.t.Model.Supersteps.(condition.Adaptive)
	if !ok {
		return
	}
	reports := make([]condition.Report, 0, len(d.ranks))
	for _, s := range d.ranks {
		reports = append(reports, s.Report)
	}
	d.now = rule.Thresholds(reports)
}

// changed takes in who still takes part: found out under the lock, as key.live does.
func (d *decider) changed() []stop {
	d.mu.Lock()
	defer d.mu.Unlock()
	live := d.t.Live()
	d.live = live
	for rank := range d.ranks {
		if !live.Has(rank) {
			delete(d.ranks, rank)
		}
	}
	d.measure()
	if live.Len() == 0 {
		return nil
	}
	stops := d.decide(func() (barrier.Plan, bool) { return d.planner.Live(live) })
	d.proceed()
	return stops
}

// tell sends each rank its stop.
func (d *decider) tell(stops []stop) {
	for _, s := range stops {
		d.t.Stop(s.rank, s.h)
	}
}

// stock tells the decider beside the tensor, if there is one, who takes part now.
func (t *tensor) stock() {
	t.mu.Lock()
	d := t.decider
	t.mu.Unlock()
	if d != nil {
		d.tell(d.changed())
	}
}

// Report is the local worker's end of an iteration under a model with supersteps.
func (l *Local) Report(h wire.Header) error {
	if l.r.members.Now().Classify(h.Epoch) != membership.Current {
		return nil // all ranks have joined meanwhile, and nothing is held any more
	}
	return l.r.report(&h)
}
