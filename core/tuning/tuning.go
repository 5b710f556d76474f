// Package tuning searches for the partition size, credit, batch and connections with which a job trains fastest, while
// it trains. It is pure: a worker runs the trials and measures them (worker/tuner.go).
//
// Time is counted in steps, the uses of a tensor's name. A trial is a number of steps in a row with one Point. Trials
// that are to be compared form a phase. In a phase every candidate is tried several times, in alternating order, so that
// a machine which others use as well slows all of them alike. When a phase has been measured, Decide begins the next:
//
//  1. warm-up, with the settings of the job, which is not measured;
//  2. one phase for each setting, with candidates around the best point so far: coordinate descent;
//  3. the best point against the settings of the job: the final;
//  4. the end, with the winner. It is the job's own settings unless the other won nearly each time.
//
// All ranks search, with the same measurements and the same results: the search compares and divides, and calls no
// function whose last bit depends on the machine.
//
// The trials are after Horovod's autotuner (HOROVOD_AUTOTUNE), which has warm-up samples and a number of steps for each
// sample too, and chooses by the rate of bytes. Horovod's Bayesian optimisation ends with the best sample; here the
// final follows, because a single best sample may be noise.
package tuning

import (
	"fmt"
	"slices"

	"github.com/paceline/paceline/internal/limits"
)

// Point is one choice. All but Connections, which are those to each server, are bytes.
type Point struct {
	Partition   int64
	Credit      int64
	Fusion      int64
	Connections int64
}

// Config says what is searched and how.
type Config struct {
	Start   Point // the job's own settings
	KeepCut bool  // the partition size stays
	Warmup  int   // trials of the warm-up
	Steps   int   // of each trial
}

const (
	repeats = 4 // trials of each candidate
	finals  = 8 // trials of each of the two in the final

	// Gap is the number of steps between the last trial of a phase and the next phase: meanwhile ranks tell each other
	// what they have measured.
	Gap = 2

	maxCredit      = 1 << 30
	minCredit      = 1 << 20
	minFusion      = 4 << 10
	maxFusion      = limits.MaxFused
	maxConnections = 4
)

// An axis is one setting, with the candidates for it around a value.
type axis struct {
	name  string
	value func(*Point) *int64
	low   int64
	high  int64
	by    []int64 // factors of the candidates beside the value itself; negative ones divide
}

// axes are all settings, in the order in which they are searched: those that move most first.
var axes = []axis{
	{"partition", func(p *Point) *int64 { return &p.Partition }, limits.MinPartition, limits.MaxPartition, []int64{-16, -4, 4}},
	{"credit", func(p *Point) *int64 { return &p.Credit }, minCredit, maxCredit, []int64{-4, 4}},
	{"fusion", func(p *Point) *int64 { return &p.Fusion }, minFusion, maxFusion, []int64{-4, 4}},
	{"connections", func(p *Point) *int64 { return &p.Connections }, 1, maxConnections, []int64{2, 4}},
}

// candidates are the points that an axis offers, p itself first.
func (a *axis) candidates(p Point) []Point {
	all := []Point{p}
	now := *a.value(&p)
	if now <= 0 { // it is off
		return all
	}
	for _, f := range a.by {
		v := now * f
		if f < 0 {
			v = now / -f
		}
		if v = min(max(v, min(a.low, now)), max(a.high, now)); v != now {
			other := p
			*a.value(&other) = v
			all = append(all, other)
		}
	}
	return slices.Compact(all)
}

// Bounds are the least credit and the most connections that a search from a point may come to.
func Bounds(start Point) (credit, conns int64) {
	credit, conns = start.Credit, start.Connections
	for i := range axes {
		for _, p := range axes[i].candidates(start) {
			credit, conns = min(credit, p.Credit), max(conns, p.Connections)
		}
	}
	return credit, conns
}

// better reports whether candidates with these ratios of rates, one for each round, are faster than what they were
// compared with, by more than rounds differ: all but one are faster, and half of them by more than a hundredth. It
// sorts them.
func better(ratios []float64) bool {
	slices.Sort(ratios)
	return len(ratios) > 1 && ratios[1] > 1 && median(ratios) > 1.01
}

// median is the lower one of sorted values.
func median(sorted []float64) float64 { return sorted[(len(sorted)-1)/2] }

// String writes the point as settings, to be copied into an environment.
func (p Point) String() string {
	return fmt.Sprintf("PACELINE_PARTITION_BYTES=%d PACELINE_CREDIT_BYTES=%d PACELINE_FUSION_BYTES=%d PACELINE_CONNECTIONS=%d", p.Partition, p.Credit, p.Fusion, p.Connections)
}
