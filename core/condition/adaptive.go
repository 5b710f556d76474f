package condition

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// AdaptiveModel is the adaptive model (algorithms.md section 3), with the thresholds that it takes
// among workers that are all alike. The setting is "adaptive:S,W".
func AdaptiveModel(a Adaptive) Model {
	return Model{Name: fmt.Sprintf("adaptive:%d,%d", a.S, a.W), Pull: Closed{}, Push: EveryLive{}, Supersteps: a}
}

func newAdaptive(a *Arguments) (Model, error) {
	s := a.Iterations("S", 1)
	return a.End(AdaptiveModel(Adaptive{S: s, W: a.Iterations("W", 1)}))
}

// Adaptive are the two thresholds of the adaptive model, in iterations since the last barrier. Both
// are at least 1, as the paper counts: S = 1 or W = 1 is BSP among workers that are alike.
type Adaptive struct {
	S uint64 // stale threshold: the lead of the fastest over the slowest at which a barrier is due
	W uint64 // weak threshold: iterations of the slowest at which a barrier is due
}

func (a Adaptive) String() string {
	return fmt.Sprintf("a lead of %d, or the slowest has done %d", a.S, a.W)
}

// Due reports whether a barrier is due when the live workers have done these numbers of iterations
// since the last: then each finishes the iteration that it is in, pushes it and waits.
func (a Adaptive) Due(done []uint64) bool {
	if len(done) == 0 {
		return false
	}
	slowest := slices.Min(done)
	return slices.Max(done)-slowest >= a.S || slowest >= a.W
}

// Thresholds are those for the workers as they are now; a are those for workers that are alike.
//
// The paper says that both follow monitoring and gives no rule; this one is ours. By its equation 4
// the regret grows with s/α + 1, α being how much the workers differ, so s = S·α holds the bound where
// S alone has it among equals. W grows alike: among equals, where the lead never reaches s, it is W
// that ends a superstep; from a difference of 2 on, where a superstep of w iterations of the slowest
// would let the fastest lead by more than s, it is s.
func (a Adaptive) Thresholds(reports []Report) Adaptive {
	alpha := Difference(reports)
	return Adaptive{S: stretch(a.S, alpha), W: stretch(a.W, alpha)}
}

// Difference is the factor α by which the workers differ: 1 where they are alike. It is the larger of
// two signals: the slowest worker's interval over the fastest's, which is what slows a job down, and
// 1 plus the spread of the nodes' CPU occupancies (the paper's signal), which shows an interfering
// program before an iteration under it has ended.
func Difference(reports []Report) float64 {
	alpha := 1.0
	var short, long time.Duration
	low, high := math.Inf(1), math.Inf(-1)
	for _, w := range reports {
		low, high = min(low, w.Occupancy), max(high, w.Occupancy)
		if w.Interval <= 0 {
			continue
		}
		if short == 0 || w.Interval < short {
			short = w.Interval
		}
		long = max(long, w.Interval)
	}
	if short > 0 {
		alpha = float64(long) / float64(short)
	}
	if high > low {
		alpha = max(alpha, 1+high-low)
	}
	return alpha
}

// stretch is threshold·alpha to the nearest whole number, within what a machine bears.
func stretch(threshold uint64, alpha float64) uint64 {
	return uint64(min(math.Round(float64(threshold)*alpha), MaxLead-1))
}
