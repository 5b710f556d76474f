package condition

import (
	"fmt"
	"time"

	"github.com/paceline/paceline/core/barrier"
)

// MaxPredictions bounds the iterations of each worker that ElasticBSP looks ahead.
const MaxPredictions = 10_000

// ElasticModel is ElasticBSP (its paper's section 3), which looks r iterations of each worker ahead
// for the barrier that makes workers wait least. The setting is "elastic:R".
func ElasticModel(r int) Model {
	return Model{Name: fmt.Sprintf("elastic:%d", r), Pull: Closed{}, Push: EveryLive{}, Supersteps: Elastic{r}}
}

func newElastic(a *Arguments) (Model, error) {
	return a.End(ElasticModel(int(a.Whole("R", 1, MaxPredictions))))
}

// Elastic puts a barrier where package core/barrier finds it, among Predictions iterations of each worker.
type Elastic struct{ Predictions int }

// Rule implements Supersteps.
func (e Elastic) Rule() Rule { return &elasticRule{predictions: max(e.Predictions, 1)} }

// Asks implements Supersteps: a barrier is predicted, so it never falls at the iteration that makes the
// prediction possible.
func (Elastic) Asks(uint64) bool { return false }

func (e Elastic) String() string {
	return fmt.Sprintf("the least wait within %d iterations", e.Predictions)
}

// iterationsToPlan is the number of iterations of each worker between the last barrier and a plan: two ends make an
// interval, and the wait at the barrier precedes the first.
const iterationsToPlan = 2

// elasticRule monitors, predicts and chooses. A wrong prediction makes workers wait longer at one barrier and does no
// other harm.
type elasticRule struct {
	predictions int
	search      barrier.Search
	ends        [][]time.Duration
	buffer      []time.Duration
}

// Due implements Rule.
func (r *elasticRule) Due(live []Stride) bool {
	r.ends, r.buffer = r.ends[:0], r.buffer[:0]
	for i := range live {
		s := &live[i]
		if s.Ended {
			continue
		}
		if s.Done < iterationsToPlan || s.Gap == 0 {
			return false
		}
		from := len(r.buffer)
		for k := range r.predictions {
			r.buffer = append(r.buffer, s.At+time.Duration(k+1)*s.Gap)
		}
		r.ends = append(r.ends, r.buffer[from:])
	}
	choice, ok := r.search.ZipLine(r.ends)
	if !ok {
		return false
	}
	row := 0
	for i := range live {
		if s := &live[i]; !s.Ended {
			s.Stop = s.Done + uint64(choice.Index(r.ends[row])) + 1
			row++
		}
	}
	return true
}

// Thresholds implements Rule: there are none.
func (*elasticRule) Thresholds() Thresholds { return Thresholds{} }
