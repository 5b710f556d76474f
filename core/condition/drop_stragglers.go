package condition

import (
	"fmt"

	"github.com/paceline/paceline/internal/limits"
)

// DropStragglers closes an iteration when nt workers have pushed it, and drops the pushes that come
// later (FluentPS Table III, row drop-stragglers; backup workers are N - nt). The setting is
// "drop-stragglers:NT".
func DropStragglers(nt int) Model {
	return Model{Name: fmt.Sprintf("drop-stragglers:%d", nt), Pull: Closed{}, Push: Enough{nt}}
}

func newDropStragglers(a *Arguments) (Model, error) {
	return a.End(DropStragglers(int(a.Iterations("NT", 1))))
}

// Enough holds when Nt live ranks, or all if fewer are live, have pushed the open iteration and no rank is
// further behind than the sums that are kept for it: a straggler that lost a sum would diverge.
type Enough struct{ Nt int }

// Holds implements PushCondition.
func (c Enough) Holds(v View) bool {
	n := v.Count(v.V)
	return n == v.N || n >= c.Nt && v.V < v.Slowest+limits.MaxKept
}

func (c Enough) String() string { return fmt.Sprintf("count[V] == %d", c.Nt) }

// Quorum implements Quorum.
func (c Enough) Quorum(n int) int { return min(c.Nt, n) }

// CheckWorkers implements Sized.
func (c Enough) CheckWorkers(n int) error {
	if c.Nt < 1 || c.Nt > n {
		return fmt.Errorf("push condition %q waits for %d workers of %d: allowed is from 1 to %d", c, c.Nt, n, n)
	}
	return nil
}
