package condition

import (
	"fmt"
	"math"
	"time"
)

// AdaptiveModel is the adaptive model (the adaptive paper, section III), with the thresholds that apply
// among equal workers. The setting is "adaptive:S,W".
func AdaptiveModel(a Adaptive) Model {
	return Model{Name: fmt.Sprintf("adaptive:%d,%d", a.S, a.W), Pull: Closed{}, Push: EveryLive{}, Supersteps: a}
}

func newAdaptive(a *Arguments) (Model, error) {
	s := a.Iterations("S", 1)
	return a.End(AdaptiveModel(Adaptive{S: s, W: a.Iterations("W", 1)}))
}

// Adaptive is the adaptive model by its thresholds among equal workers.
type Adaptive Thresholds

// Rule implements Supersteps.
func (a Adaptive) Rule() Rule { return &adaptiveRule{base: a, now: a} }

// Asks implements Supersteps: thresholds never fall below those for equals, so before the lesser of them no
// rank can lead by S, nor be the slowest with W iterations.
func (a Adaptive) Asks(iteration uint64) bool { return iteration >= min(a.S, a.W) }

func (a Adaptive) String() string { return Thresholds(a).String() }

// Due reports whether a barrier is due when the live workers have done these numbers of iterations since the last:
// then each finishes its current iteration, pushes it and waits.
func (a Adaptive) Due(slowest, fastest uint64) bool { return fastest-slowest >= a.S || slowest >= a.W }

// adaptiveRule updates the thresholds with every report, so that one long iteration, for example with a checkpoint,
// counts until that worker's next one, not for the whole superstep that it would allow.
type adaptiveRule struct{ base, now Adaptive }

// Due implements Rule.
func (r *adaptiveRule) Due(live []Stride) bool {
	r.now = r.base.Thresholds(live)
	slowest, fastest, any := uint64(math.MaxUint64), uint64(0), false
	for i := range live {
		if s := &live[i]; !s.Ended {
			slowest, fastest, any = min(slowest, s.Done), max(fastest, s.Done), true
		}
	}
	if !any || !r.now.Due(slowest, fastest) {
		return false
	}
	for i := range live {
		if s := &live[i]; s.Waits {
			s.Stop = s.Done
		} else {
			s.Stop = s.Done + 1 // at the end of its current iteration
		}
	}
	return true
}

// Thresholds implements Rule.
func (r *adaptiveRule) Thresholds() Thresholds { return Thresholds(r.now) }

// Thresholds are those for the current workers; a holds those for equal workers.
//
// The paper says that both follow monitoring and gives no rule; this one is ours. By its equation 4
// the regret grows with s/α + 1, where α is the workers' difference, so s = S·α keeps the bound that
// S has among equals. W grows by the same factor: among equals the lead never reaches s, and W ends a superstep;
// from a difference of 2 on, a superstep of w iterations of the slowest would let the fastest lead by more than
// s, and s ends it.
func (a Adaptive) Thresholds(live []Stride) Adaptive {
	alpha := Difference(live)
	return Adaptive{S: stretch(a.S, alpha), W: stretch(a.W, alpha)}
}

// Difference is the factor α by which the workers differ: 1 among equals. It is the larger of
// two signals: the slowest worker's interval over the fastest's, which is what slows a job down, and
// 1 plus the spread of the nodes' CPU occupancies (the paper's signal), which shows an interfering
// program before an iteration under it has ended.
func Difference(live []Stride) float64 {
	alpha := 1.0
	var short, long time.Duration
	low, high := math.Inf(1), math.Inf(-1)
	for i := range live {
		w := &live[i].Report
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

// stretch is threshold·alpha, rounded, within a machine's limit.
func stretch(threshold uint64, alpha float64) uint64 {
	return uint64(min(math.Round(float64(threshold)*alpha), MaxLead-1))
}
