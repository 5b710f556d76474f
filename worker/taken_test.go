package worker

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/transport/wire"
)

func TestTheOldestSendInFlightIsKnownInWhateverOrderTheyEnd(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	f := (&messages{}).sendsTo(1)
	var inFlight []uint64
	for number := range uint64(5000) {
		if random.IntN(3) == 0 { // numbers of other sends lie between
			continue
		}
		inFlight = append(inFlight, number)
		if oldest := f.begin(number); oldest != inFlight[0] {
			t.Fatalf("%d is the oldest, of %v", oldest, inFlight)
		}
		for len(inFlight) > 0 && random.IntN(2) == 0 {
			i := random.IntN(len(inFlight))
			f.end(inFlight[i])
			inFlight = slices.Delete(inFlight, i, i+1)
		}
	}
	for _, number := range inFlight {
		f.end(number)
	}
	if len(f.from)+len(f.over) > 0 {
		t.Errorf("%v and %v are kept", f.from, f.over)
	}
}

// What a rank has had it keeps until the sender has heard of it, also of a message whose place another took.
func TestARankKeepsWhatItHasHadUntilItsSenderHasHeard(t *testing.T) {
	var m messages
	for number, oldest := range []uint64{0, 0, 0, 2, 2, 4} {
		m.has(1, taken{7, uint64(number), wire.Match{}}, oldest)
	}
	m.has(1, taken{7, 9, wire.Match{Outcome: wire.Withdrawn}}, 3) // an older word, which came late
	m.has(2, taken{7, 0, wire.Match{}}, 0)
	if got, want := fmt.Sprint(m.had[1].messages), "[{7 4 {0 0 0 0 0}} {7 5 {0 0 0 0 0}} {7 9 {3 0 0 0 0}}]"; got != want {
		t.Errorf("%s is kept, want %s", got, want)
	}
	if len(m.had[2].messages) != 1 {
		t.Errorf("another rank's are %v", m.had[2].messages)
	}
}
