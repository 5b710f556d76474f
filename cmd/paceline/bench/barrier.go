package bench

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/paceline/paceline/core/barrier"
	"github.com/paceline/paceline/core/barrier/reference"
)

// BarrierPlan describes a measurement of ElasticBSP's barrier.
type BarrierPlan struct {
	Workers, Predictions int
	Searches             int // to time, each in an input of its own
	Inputs               int // at most, per cell of the table of waits; 0: no table
	Seed                 uint64
}

// checked is the number of inputs that the paper's search checks.
const checked = 3

// BarrierReport is the time and the result of predicting barriers.
type BarrierReport struct {
	Head
	Workers     int     `json:"workers"`
	Predictions int     `json:"predictions"`
	Seed        uint64  `json:"seed"`
	Searches    int     `json:"searches"`
	Median      float64 `json:"median_ms"` // of one search
	Least       float64 `json:"least_ms"`
	Most        float64 `json:"most_ms"`
	OptBS       float64 `json:"zipline_opt_bs_ms"`      // median of the paper's ZipLineOptBS on this machine
	Published   float64 `json:"published_ms,omitempty"` // by the paper for its fastest exact search, on its machine
	Wait        float64 `json:"wait_ms"`                // that these barriers cost the first worker, on average
	Waits       []Waits `json:"waits,omitempty"`
}

// Waits is a cell of the paper's table 3 beside our result, in ms.
type Waits struct {
	Workers     int     `json:"workers"`
	Predictions int     `json:"predictions"`
	Inputs      int     `json:"inputs"`
	Mean        float64 `json:"mean_ms"`
	Deviation   float64 `json:"deviation_ms"` // of single inputs
	Paper       float64 `json:"paper_ms"`
}

// MeasureBarrier times searches in inputs made in advance, and checks some of the results with the paper's
// search.
func MeasureBarrier(p BarrierPlan) (BarrierReport, error) {
	r := BarrierReport{Head: NewHead("barrier"), Workers: p.Workers, Predictions: p.Predictions, Seed: p.Seed, Searches: p.Searches}
	rng := rand.New(rand.NewPCG(p.Seed, 0))
	var search barrier.Search
	var ours, theirs []float64
	for k := range p.Searches {
		ends := reference.Ends(rng, p.Workers, p.Predictions, reference.WarmUp)
		var found, check barrier.Choice
		ours = append(ours, timed(func() { found, _ = search.ZipLine(ends) }))
		r.Wait += ms(found.Wait) / float64(p.Searches)
		if k >= checked {
			continue
		}
		theirs = append(theirs, timed(func() { check = reference.ZipLineOptBS(ends) }))
		if found != check {
			return r, fmt.Errorf("seed %d, input %d: the barrier of least wait is found at %v with %v, ZipLineOptBS finds %v with %v",
				p.Seed, k, found.At, found.Wait, check.At, check.Wait)
		}
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	r.Median, r.Least, r.Most, r.OptBS = quantile(ours, 0.5), ours[0], ours[len(ours)-1], quantile(theirs, 0.5)
	for _, c := range reference.Table3 {
		if c.Workers == p.Workers && c.Predictions == p.Predictions {
			r.Published = ms(c.Time)
		}
		if p.Inputs > 0 {
			r.Waits = append(r.Waits, waits(rng, c, max(1, min(p.Inputs, 10_000/c.Workers))))
		}
	}
	return r, nil
}

func waits(rng *rand.Rand, c reference.Case, inputs int) Waits {
	mean, deviation := reference.Waits(rng, c.Workers, c.Predictions, inputs)
	return Waits{Workers: c.Workers, Predictions: c.Predictions, Inputs: inputs, Mean: ms(mean), Deviation: ms(deviation), Paper: ms(c.Wait)}
}

func timed(f func()) float64 {
	start := time.Now()
	f()
	return ms(time.Since(start))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// Show prints the report as tables.
func (r *BarrierReport) Show(out io.Writer) {
	fmt.Fprintf(out, "%d workers, %d predictions of each: %.3f ms to find a barrier (median of %d, %.3f to %.3f)\n",
		r.Workers, r.Predictions, r.Median, r.Searches, r.Least, r.Most)
	fmt.Fprintf(out, "ZipLineOptBS on this machine: %.3f ms, and the same barriers\n", r.OptBS)
	if r.Published > 0 {
		fmt.Fprintf(out, "published for the fastest exact search: %.3f ms\n", r.Published)
	}
	if len(r.Waits) == 0 {
		return
	}
	fmt.Fprint(out, "\nleast waiting time\n")
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "workers\tpredictions\tmean ms\t± of one input\tinputs\tpublished ms\toff\t\n")
	for _, w := range r.Waits {
		fmt.Fprintf(table, "%d\t%d\t%.0f\t%.0f\t%d\t%.0f\t%+.1f %%\t\n", w.Workers, w.Predictions, w.Mean, w.Deviation, w.Inputs, w.Paper, 100*(w.Mean/w.Paper-1))
	}
	_ = table.Flush() // as with Fprintf: there is no one to report to
}
