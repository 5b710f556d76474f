package sim

import (
	"slices"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/internal/rankset"
)

// decider decides for all shards where supersteps end (adaptive, elastic), and the pull condition of a model that
// tunes it (DSPS). It lies beside the first key; messages to and from it take one latency.
type decider struct {
	supersteps *superstep.Decider // nil: no supersteps
	tuning     *condition.Tuning  // nil: the pull condition stays

	// The ledger of supersteps, from the pushes to the first key.
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

// pushed enters a push of an iteration in the ledger: its worker's lead, and how many iterations of the slowest
// the value of the answer may miss.
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

// survey recomputes the slowest.
func (d *decider) survey() {
	d.slowest, d.atSlowest = slices.Min(d.done), 0
	for _, n := range d.done {
		if n == d.slowest {
			d.atSlowest++
		}
	}
}
