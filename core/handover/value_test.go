package handover

import (
	"testing"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/rankset"
)

// A rank that was left behind by closed iterations is as far back as before, so that others wait for it as they did.
func TestAResumedMachineKnowsWhoIsBehind(t *testing.T) {
	c := Cover{Closed: 5, Ranks: []Covered{{0, 9, 7}, {1, 6, 5}, {2, 3, 2}}}
	m, err := c.Resume(condition.Config{Live: rankset.Range(3), Model: condition.DropStragglers(2), Dataflow: condition.Accumulate})
	if err != nil {
		t.Fatal(err)
	}
	if m.V() != 5 || m.Fastest() != 7 {
		t.Errorf("V is %d and the fastest at %d, want 5 and 7", m.V(), m.Fastest())
	}
	if missing := m.Missing(5); missing.String() != "[1, 2]" {
		t.Errorf("iteration 5 waits for %v, want 1 and 2", missing)
	}
	if out := m.Step(condition.Push(2, 2, 0), nil); out[0].Kind != condition.Drop {
		t.Errorf("the straggler's late push: %v, want a drop", out)
	}
}
