package condition

import "fmt"

// SSP is the stale synchronous model: a worker may lead by s iterations (FluentPS Table III, row SSP).
// SSP(0) is BSP; papers that count from 1 call that s = 1. The setting is "ssp:S".
func SSP(s uint64) Model {
	return Model{Name: fmt.Sprintf("ssp:%d", s), Pull: Within{s}, Push: EveryLive{}, Dataflow: Accumulate}
}

func newSSP(a *Arguments) (Model, error) { return a.End(SSP(a.Iterations("S", 0))) }

// Within holds while the pull's iteration is less than S beyond the closed ones: i < V + s. So a
// worker that waits for its pulls never pushes an iteration more than S beyond the open one.
type Within struct{ S uint64 }

// Holds implements PullCondition.
func (c Within) Holds(v View) bool { return v.Progress < v.V+c.S }

// Ahead implements PullCondition.
func (c Within) Ahead() bool { return c.S > 0 }

// Bound implements Bounded.
func (c Within) Bound() (uint64, bool) { return c.S, true }

// Narrow implements Narrow.
func (Within) Narrow() bool { return true }

func (c Within) String() string { return fmt.Sprintf("i < V + %d", c.S) }
