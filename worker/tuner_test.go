package worker

import (
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/units"
)

// TestWhatWaitsForAPhaseGoesOnWhereItsReportIsRefused: to the end of the engine, or to a report of its own.
func TestWhatWaitsForAPhaseGoesOnWhereItsReportIsRefused(t *testing.T) {
	for why, happens := range map[string]func(e *Engine){
		"a peer is lost": func(e *Engine) { e.end(ErrPeerLost) },
		"too many are in flight": func(e *Engine) {
			n := e.nameOf(nameID{name: tuningName})
			count, _ := n.Count()
			n.Begin(count, nil, nil)
			if err := e.pace([]Op{{Kind: units.Allreduce, Name: "x"}}); err == nil {
				t.Error("the report was not refused")
			}
		},
	} {
		t.Run(why, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := New(Config{Membership: membership.NewView(&membership.Epoch{Workers: make([]membership.Worker, 2)}), Tuning: &Tuning{Steps: 1}})
				n := e.nameOf(nameID{name: "x"})
				for known := true; known; _, known = e.tuner.search.At(n.Next()) {
					_, _ = n.Count()
				}
				e.tuner.asked = true // by another thread
				paced := make(chan error)
				go func() { paced <- e.pace([]Op{{Kind: units.Allreduce, Name: "x"}}) }()
				synctest.Wait()
				select {
				case err := <-paced:
					t.Fatalf("it does not wait: %v", err)
				default:
				}
				e.tuner.asked = false
				happens(e)
				if err := <-paced; (err != nil) != (e.broken == nil) { // its own report is refused as well
					t.Error(err)
				}
				e.end(ErrPeerLost)
			})
		})
	}
}
