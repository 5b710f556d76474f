package sim

import (
	"slices"
	"time"

	"github.com/paceline/paceline/core/barrier"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/rankset"
)

// decider is the one that decides for all shards: where supersteps end (adaptive, elastic), and the
// pull condition of a model that tunes it (DSPS). It sits beside the first key, hears each push when
// that key does, and is heard a latency later.
type decider struct {
	rule    condition.Supersteps // nil: iterations are steps of their own
	planner *barrier.Planner     // of an Elastic
	now     condition.Adaptive   // thresholds of an Adaptive, by the workers' newest reports
	tuner   condition.Tuner

	reports   []condition.Report
	done      []uint64 // iterations in this superstep
	stop      []uint64 // the iteration of the superstep, from 1, that is a worker's last; 0: not known
	ended     int      // workers that have done their last
	stopping  bool     // the end of this superstep is decided
	superstep uint64
	next      condition.PullCondition // that a tuner has found last

	slowest          uint64 // the least of done
	atSlowest        int    // how many workers are there
	leads, staleness sum
}

func newDecider(s Scenario) *decider {
	d := &decider{rule: s.Model.Supersteps, tuner: s.Model.Tuner}
	if d.rule == nil && d.tuner == nil {
		return nil
	}
	n := s.Workers
	d.reports, d.done, d.stop, d.atSlowest = make([]condition.Report, n), make([]uint64, n), make([]uint64, n), n
	for r := range d.reports {
		d.reports[r].Rank = r
	}
	switch rule := d.rule.(type) {
	case condition.Elastic:
		d.planner = barrier.NewPlanner(rankset.Range(n), rule.Predictions)
	case condition.Adaptive:
		d.now = rule
	}
	return d
}

// hear takes a push of an iteration that took the worker an interval, without waits. If that decides
// where the superstep ends, it reports so, and d.stop holds each worker's last iteration.
func (d *decider) hear(rank int, at, interval time.Duration, last bool) (decided bool) {
	r := &d.reports[rank]
	r.Pushed, r.At, r.Interval = r.Pushed+1, at, interval
	if d.rule == nil {
		return false
	}
	d.count(rank)
	if rule, ok := d.rule.(condition.Adaptive); ok && !d.stopping {
		d.now = rule.Thresholds(d.reports)
	}
	if d.planner != nil {
		plan, ok := d.planner.Push(rank, at, last)
		for _, s := range plan.Stops {
			d.stop[s.Rank] = s.Iteration
		}
		decided = ok
	} else if !d.stopping && d.now.Due(d.done) {
		for r := range d.stop {
			d.stop[r] = 1 // whatever it is in when it hears of it
		}
		decided = true
	}
	d.stopping = d.stopping || decided
	if last {
		if d.ended++; d.ended == len(d.done) {
			d.begin()
		}
	}
	return decided
}

// count counts an iteration of the superstep, and how far its worker leads.
func (d *decider) count(rank int) {
	d.leads.add(d.done[rank] - d.slowest)
	d.done[rank]++
	if d.done[rank] != d.slowest+1 {
		return
	}
	if d.atSlowest--; d.atSlowest == 0 {
		d.slowest = slices.Min(d.done)
		for _, n := range d.done {
			if n == d.slowest {
				d.atSlowest++
			}
		}
	}
}

// stale is how many iterations of the slowest the value may miss that a worker is given within a
// superstep.
func (d *decider) stale(rank int, last bool) {
	if last {
		d.staleness.add(0)
		return
	}
	d.staleness.add(d.done[rank] - d.slowest)
}

// begin begins the next superstep.
func (d *decider) begin() {
	d.superstep++
	d.ended, d.stopping = 0, false
	clear(d.done)
	d.slowest, d.atSlowest = 0, len(d.done)
}

// tune finds the pull condition of the workers as they are now.
func (d *decider) tune() { d.next = d.tuner.Tune(d.reports) }
