package worker

import (
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/units"
)

// TestWhatWaitsForAPhaseGoesOnWhereNobodyDecidesIt: a thread waits for the report of another, which is refused, or is not made any more.
func TestWhatWaitsForAPhaseGoesOnWhereNobodyDecidesIt(t *testing.T) {
	for why, happens := range map[string]func(e *Engine){
		"a peer is lost": func(e *Engine) {
			e.tuner.asked = true
			e.end(ErrPeerLost)
		},
		"the report is refused": func(e *Engine) {
			n := e.nameOf(nameID{name: tuningName})
			count, _ := n.Count()
			n.Begin(count, nil, nil) // it is in flight
			if err := e.pace([]Op{{Kind: units.Allreduce, Name: "x"}}); err == nil {
				t.Error("the report was not refused")
			}
		},
		"all ranks join": func(e *Engine) {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.names = map[nameID]*nameState{}
			e.tuner = e.tuner.anew()
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
				if err := <-paced; err != nil {
					t.Error(err)
				}
				e.end(ErrPeerLost)
			})
		})
	}
}
