package sim

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Result is what a run measured. Times are virtual; shares are of all workers' time together.
type Result struct {
	Model      string  `json:"model"`
	Parking    string  `json:"parking"`
	Barrier    string  `json:"barrier"`
	Seed       uint64  `json:"seed"`
	Seconds    float64 `json:"seconds"`    // until the run's end
	Done       uint64  `json:"iterations"` // of all workers together
	Throughput float64 `json:"per_second"` // iterations of all workers together
	Compute    float64 `json:"compute"`    // share of the time in which workers compute
	Wait       float64 `json:"wait"`       // share in which a worker has pushed all and a server delays an answer
	Exchange   float64 `json:"exchange"`   // share of pushing and pulling
	Idle       float64 `json:"idle"`       // share of workers that are done, or cut off in an iteration
	Pulls      uint64  `json:"pulls"`      // that reached a condition, of all keys
	Delayed    uint64  `json:"delayed"`    // of these, the papers' DPRs
	Dropped    uint64  `json:"dropped"`    // pushes that came late, of all keys
	MeanLead   float64 `json:"mean_lead"`  // iterations that a push is ahead of the slowest worker's
	MaxLead    uint64  `json:"max_lead"`
	Staleness  float64 `json:"staleness"` // iterations whose pushes an answered value may miss, on average
	MaxStale   uint64  `json:"max_stale"`
	Supersteps uint64  `json:"supersteps"` // number of barriers, under the models that have them
	Events     uint64  `json:"events"`     // of the run

	compute, wait, exchange float64 // seconds, of all workers together: a time.Duration may be too short
}

// DelayedShare is the part of the pulls that were delayed.
func (r Result) DelayedShare() float64 { return float64(r.Delayed) / max(1, float64(r.Pulls)) }

// Delays is the number of delayed pulls while this number of workers do this number of iterations each.
func (r Result) Delays(iterations, workers int) float64 {
	return float64(r.Delayed) * float64(iterations*workers) / max(1, float64(r.Done))
}

// summary is the result of a run that is over.
func (r *run) summary() Result {
	s := r.result
	s.Model, s.Parking, s.Barrier, s.Seed = r.Model.Name, r.Parking.String(), r.Barrier.String(), r.Seed
	s.Seconds = r.now.Seconds()
	all := s.Seconds * float64(r.Workers)
	if all > 0 {
		s.Throughput = float64(s.Done) / s.Seconds
		s.Compute, s.Wait, s.Exchange = s.compute/all, s.wait/all, s.exchange/all
		s.Idle = max(0, 1-s.Compute-s.Wait-s.Exchange)
	}
	var leads, staleness sum
	for _, g := range r.gates {
		s.Pulls += g.tally.Admitted + g.tally.Dropped
		s.Delayed += g.tally.Delayed
		s.Dropped += g.tally.Dropped
		leads.merge(g.leads)
		staleness.merge(g.staleness)
	}
	if r.Model.Supersteps != nil {
		leads, staleness = r.decider.leads, r.decider.staleness
		s.Supersteps = r.decider.supersteps.Superstep()
	}
	s.MeanLead, s.MaxLead = leads.mean(), leads.most
	s.Staleness, s.MaxStale = staleness.mean(), staleness.most
	return s
}

// Show prints results as a table.
func Show(out io.Writer, results []Result) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "model\tparking\tbarrier\ttime\titerations/s\tcompute\twait\texchange\tDPRs\tof pulls\tdropped\tstaleness\tmax lead")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%s\t%s\t%.3f s\t%.2f\t%.1f %%\t%.1f %%\t%.1f %%\t%d\t%.1f %%\t%d\t%.2f\t%d\n", r.Model, r.Parking, r.Barrier, r.Seconds,
			r.Throughput, 100*r.Compute, 100*r.Wait, 100*r.Exchange, r.Delayed, 100*r.DelayedShare(), r.Dropped, r.Staleness, r.MaxLead)
	}
	_ = t.Flush() // there is no one to report to
}
