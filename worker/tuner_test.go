package worker

import (
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/units"
)

// Where a peer is lost before the measurements of a phase are submitted, nothing decides the next one: who waits for that goes on with the end.
func TestWhatWaitsForAPhaseEndsWithTheEngine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := New(Config{Membership: membership.NewView(&membership.Epoch{Workers: make([]membership.Worker, 2)}), Tuning: &Tuning{Steps: 1}})
		n := e.nameOf(nameID{name: "x"})
		for known := true; known; _, known = e.tuner.search.At(n.Next()) {
			_, _ = n.Count()
		}
		e.tuner.asked = true // by a thread that is refused then
		paced := make(chan error)
		go func() { paced <- e.pace([]Op{{Kind: units.Allreduce, Name: "x"}}) }()
		synctest.Wait()
		select {
		case err := <-paced:
			t.Fatalf("it does not wait: %v", err)
		default:
		}
		e.end(ErrPeerLost)
		if err := <-paced; err != nil {
			t.Error(err)
		}
	})
}
