package condition

import (
	"fmt"
	"time"
)

// The default range of s under DSPS: DSSP's. FluentPS gives no rule for s.
const (
	DefaultLowStaleness  = 3
	DefaultHighStaleness = 15
)

// DSPS is SSP whose s moves between low and high while training runs (FluentPS Table III, row DSPS).
// It starts at low. The setting is "dsps" or "dsps:LOW,HIGH".
func DSPS(low, high uint64) Model {
	return Model{Name: fmt.Sprintf("dsps:%d,%d", low, high), Pull: Within{low}, Push: EveryLive{}, Tuner: Range{low, high}}
}

func newDSPS(a *Arguments) (Model, error) {
	if !a.More() {
		return DSPS(DefaultLowStaleness, DefaultHighStaleness), nil
	}
	low := a.Iterations("LOW", 0)
	return a.End(DSPS(low, a.Iterations("HIGH", low)))
}

// Range is DSPS's Tuner: the s of Low to High that makes the fastest worker wait least. The papers on
// DSPS give no rule, so this is DSSP's: the fastest worker has pushed k iterations more than the slowest, and the
// pull after s+1 more waits (Within); so s grants it s+1-k more iterations, and at the end of the last it waits for
// the slowest worker's next push. That is the soft barrier; lazy parking keeps it for longer, until the slowest has
// pushed as much, and then predictions of that would always favour Low. The prediction assumes their
// newest intervals. Of values of s with equal waits the smallest wins, and Low if intervals are unknown or no
// worker leads.
type Range struct{ Low, High uint64 }

// Tune implements Tuner.
func (r Range) Tune(reports []Report) PullCondition { return Within{r.staleness(reports)} }

// Bound implements Bounded.
func (r Range) Bound() (uint64, bool) { return r.High, true }

func (r Range) staleness(reports []Report) uint64 {
	if len(reports) == 0 {
		return r.Low
	}
	fastest, slowest := reports[0], reports[0]
	for _, w := range reports[1:] {
		if w.Pushed > fastest.Pushed || w.Pushed == fastest.Pushed && w.Interval < fastest.Interval {
			fastest = w
		}
		if w.Pushed < slowest.Pushed || w.Pushed == slowest.Pushed && w.Interval > slowest.Interval {
			slowest = w
		}
	}
	if fastest.Interval <= 0 || slowest.Interval <= 0 || fastest.Pushed == slowest.Pushed {
		return r.Low
	}
	more := fastest.Pushed - slowest.Pushed
	best, least := r.Low, time.Duration(-1)
	for s := r.Low; s <= r.High; s++ {
		end := fastest.At
		if s+1 > more {
			end += time.Duration(s+1-more) * fastest.Interval
		}
		if wait := untilPush(slowest, end); least < 0 || wait < least {
			best, least = s, wait
		}
	}
	return best
}

// untilPush is how long after t the worker's next push is predicted. One iteration is running: the
// first predicted push comes an interval after the newest.
func untilPush(w Report, t time.Duration) time.Duration {
	next := w.At + w.Interval
	if late := t - next; late > 0 {
		next += (late + w.Interval - 1) / w.Interval * w.Interval
	}
	return next - t
}
