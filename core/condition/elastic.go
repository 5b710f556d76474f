package condition

import "fmt"

// MaxPredictions bounds the iterations of each worker that ElasticBSP looks ahead.
const MaxPredictions = 10_000

// ElasticModel is ElasticBSP (algorithms.md section 5), which looks r iterations of each worker ahead
// for the barrier that makes workers wait least. The setting is "elastic:R".
func ElasticModel(r int) Model {
	return Model{Name: fmt.Sprintf("elastic:%d", r), Pull: Closed{}, Push: EveryLive{}, Supersteps: Elastic{r}}
}

func newElastic(a *Arguments) (Model, error) {
	return a.End(ElasticModel(int(a.Whole("R", 1, MaxPredictions))))
}

// Elastic says that a barrier falls where package core/barrier finds it, among Predictions
// iterations of each worker.
type Elastic struct{ Predictions int }

func (e Elastic) String() string {
	return fmt.Sprintf("the least wait within %d iterations", e.Predictions)
}
