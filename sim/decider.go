package sim

import (
	"slices"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/internal/rankset"
)

// decider is what decides for all shards: where supersteps end (adaptive, elastic), and the pull condition of a
// model that tunes it (DSPS). It sits beside the first key, hears a latency later what a worker says, and is heard
// a latency later.
type decider struct {
	supersteps *superstep.Decider // nil: iterations are steps of their own
	tuning     *condition.Tuning  // nil: the pull condition stays

	// The ledger of supersteps, by what is pushed to the first key.
	done             []uint64 // iterations in the superstep
	ended            int      // workers that have pushed their last
	slowest          uint64   // the least of done
	atSlowest        int      // how many workers are there
	leads, staleness sum
}

func newDecider(s Scenario) *decider {
	n := s.Workers
	d := &decider{done: make([]uint64, n), atSlowest: n}
	if s.Model.Tuner != nil {
		d.tuning = condition.NewTuning(s.Model)
	}
	if s.Model.Supersteps != nil {
		d.supersteps = superstep.NewDecider(s.Model.Supersteps, rankset.Range(n))
	}
	return d
}

// pushed enters a push of an iteration in the ledger: how far its worker leads, and how many iterations of the
// slowest the value may miss that it is given.
func (d *decider) pushed(rank int, last bool) {
	d.leads.add(d.done[rank] - d.slowest)
	d.done[rank]++
	if d.done[rank] == d.slowest+1 {
		if d.atSlowest--; d.atSlowest == 0 {
			d.survey()
		}
	}
	if !last {
		d.staleness.add(d.done[rank] - d.slowest)
		return
	}
	d.staleness.add(0)
	if d.ended++; d.ended == len(d.done) {
		d.ended = 0
		clear(d.done)
		d.survey()
	}
}

// survey finds the slowest anew.
func (d *decider) survey() {
	d.slowest, d.atSlowest = slices.Min(d.done), 0
	for _, n := range d.done {
		if n == d.slowest {
			d.atSlowest++
		}
	}
}
