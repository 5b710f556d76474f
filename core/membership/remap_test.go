package membership

import (
	"testing"

	"github.com/paceline/paceline/core/placement"
)

// TestADecisionThatMovedNothingIsMadeAnewWithOtherChances: PSLD leaves a part of the keys on a straggler, to explore it (section 4.3). Where that is its only
// key, nothing moves; the next decision must not leave it there for the same reason.
func TestADecisionThatMovedNothingIsMadeAnewWithOtherChances(t *testing.T) {
	servers := []Node{{Incarnation: 1}, {Incarnation: 2}}
	profile := func(seconds float64) placement.Profile {
		sample := placement.Sample{Line: placement.Line{Beta: seconds}, Bytes: 1, Seconds: seconds}
		return placement.Profile{sample, sample}
	}
	c := Change{Profiles: placement.Profiles{profile(20), profile(1)}, Remap: true}
	stuck := 0
	for round := range uint64(300) {
		e, err := Found(1+round, "psld:0.1", []Node{{Incarnation: 3}, {Incarnation: 4}}, servers)
		if err != nil {
			t.Fatal(err)
		}
		e.Elastic = true
		dealer, err := NewDealer(e)
		if err != nil {
			t.Fatal(err)
		}
		dealer.Place([]*Tensor{{Number: 1, Name: Name{Name: "t"}, Parts: []uint32{1000, 1000}}})
		for c.Tries = 0; ; c.Tries++ {
			next, err := e.Next(c)
			if err != nil {
				t.Fatal(err)
			}
			if len(Moves(e, next)) > 0 {
				break
			}
			if c.Tries == 10 {
				t.Fatalf("round %d: no key has moved in %d decisions", round, c.Tries)
			}
		}
		if c.Tries > 0 {
			stuck++
		}
	}
	if stuck == 0 {
		t.Error("every first decision has moved a key")
	}
}
