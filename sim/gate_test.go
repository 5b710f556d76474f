package sim

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/invariant"
)

// A machine that does otherwise than its model says is found out.
func TestLedgerNoticesWhatTheMachineMustNotDo(t *testing.T) {
	for want, c := range map[string]struct {
		machine, ledger string
		parking         condition.Parking // of the ledger, where the machine's is lazy
		pushes          []uint64          // of rank 0, each with its pull
		others          uint64            // pushes of rank 1, after them
	}{
		`though "i < V" is false with V at 0`:               {"asp", "bsp", condition.Lazy, []uint64{0}, 0},
		`though "always" is true with V at 0`:               {"bsp", "asp", condition.Lazy, []uint64{0}, 0},
		"a lead of 2, the bound is 1":                       {"asp", "ssp:1", condition.Lazy, []uint64{2}, 0},
		"and 1 contributors of 2":                           {"drop-stragglers:1", "bsp", condition.Lazy, []uint64{0}, 0},
		"parked when V was 0 in soft-barrier order":         {"ssp:1", "ssp:1", condition.SoftBarrier, []uint64{0, 1}, 2},
		"push of rank 0 iteration 0 with V at 0: duplicate": {"asp", "asp", condition.Lazy, []uint64{0, 0}, 0},
	} {
		s := scenario(t, c.machine, "constant:1s", func(s *Scenario) { s.Workers = 2 })
		g, err := newGate(s)
		if err != nil {
			t.Fatal(err)
		}
		told, err := newGate(scenario(t, c.ledger, "constant:1s", func(s *Scenario) { s.Workers = 2 }))
		if err != nil {
			t.Fatal(err)
		}
		g.pull, g.bound, g.quorum, g.parking = told.pull, told.bound, told.quorum, c.parking
		for _, p := range c.pushes {
			if err == nil {
				err = g.exchange(0, p)
			}
		}
		for p := range c.others {
			if err == nil {
				err = g.exchange(1, p)
			}
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}

// Under a model without a bound a worker waits before its push would be refused, and goes on with the next advance.
func TestLedgerKnowsHowFarAWorkerMayLead(t *testing.T) {
	if invariant.On {
		t.Skip("the invariants' checks take minutes: make test-go runs it without them too")
	}
	g, err := newGate(scenario(t, "asp", "constant:1s", func(s *Scenario) { s.Workers = 2 }))
	if err != nil {
		t.Fatal(err)
	}
	for p := range uint64(condition.MaxLead) {
		if err := g.exchange(0, p); err != nil {
			t.Fatal(err)
		}
	}
	if g.waiting != 1 {
		t.Errorf("%d pulls wait", g.waiting)
	}
	if err := g.exchange(1, 0); err != nil || g.waiting != 0 {
		t.Errorf("%d pulls wait after an advance: %v", g.waiting, err)
	}
}

// A pull that is lost, and one that a machine parked unasked, are noticed at the end.
func TestLedgerNoticesLostPulls(t *testing.T) {
	g, err := newGate(scenario(t, "bsp", "constant:1s", func(s *Scenario) { s.Workers = 2 }))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.exchange(0, 0); err != nil {
		t.Fatal(err)
	}
	if err := g.end(false); err != nil {
		t.Errorf("a pull may wait while workers do: %v", err)
	}
	if err := g.end(true); err == nil {
		t.Error("a pull waits for ever")
	}
	g.waiting = 0
	if err := g.end(false); err == nil {
		t.Error("a pull is lost")
	}
	g.waiting = 1
	g.tally.Admitted++
	if err := g.end(false); err == nil {
		t.Error("a push is lost")
	}
}
