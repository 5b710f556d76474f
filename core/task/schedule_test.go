package task

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/paceline/paceline/internal/schedules"
)

// TestEveryReachableStateKeepsTheInvariants walks through all states that events can lead to.
func TestEveryReachableStateKeepsTheInvariants(t *testing.T) {
	for m := range Answered | Retained | Lent + 1 {
		seen := map[State]bool{New(m): true}
		for left := []State{New(m)}; len(left) > 0; left = left[1:] {
			for e := range Events {
				if !possible(left[0], e) {
					continue
				}
				next, out := left[0].Step(e)
				if fault := broken(left[0], e, next, out); fault != "" {
					t.Fatalf("%v to %v: %v, %v: %s", e, left[0], next, out, fault)
				}
				if !seen[next] {
					seen[next] = true
					left = append(left, next)
				}
			}
		}
	}
}

// possible reports whether an event may happen: what ends something that had not begun is a fault of the caller.
func possible(s State, e Event) bool {
	switch e {
	case Encoded, EncodeFailed:
		return s.stage() == encoding
	case Sent, SendFailed:
		return s.stage() == moving
	case Answer, GiveUp:
		return s.reply() == arriving
	case BreakOff:
		return s.reply() == arriving && s&lent == 0
	}
	return true
}

// broken says which invariant a step breaks.
func broken(was State, e Event, is State, out Effects) string {
	used := is.stage() == encoding || is.stage() == moving || is.reply() == arriving
	read := is.stage() == encoding || is.stage() == moving
	switch {
	case out&Refused != 0 && (is != was || out != Refused):
		return "a refused event changes something"
	case out&Settle != 0 && (was&settled != 0 || used):
		return "1: settled twice, or while its memory is used"
	case out&Release != 0 && (was&released != 0 || read):
		return "2: released twice, or while its memory is read"
	case out&Release != 0 && is&retained != 0 && is&(confirmed|abandoned) == 0:
		return "2: not retained"
	case is&abandoned == 0 && is&settled != 0 && (is.stage() != sent || is.reply() != none && is.reply() != arrived):
		return "3: settled before it is sent and answered"
	case is&abandoned == 0 && is&settled == 0 && is.stage() == sent && (is.reply() == none || is.reply() == arrived):
		return "3: not settled, though sent and answered"
	case is&lent != 0 && (is.stage() == moving || is.stage() == sent) && is.reply() == awaited:
		return "4: lent, and in nobody's use"
	case was&abandoned != 0 && e <= Again && out&Refused == 0:
		return "5: an abandoned task begins something"
	case is&abandoned != 0 && !used && is&(settled|released) != settled|released:
		return "5: an abandoned task that nobody uses is not settled and released"
	}
	return ""
}

// TestRandomSchedules has an encoder, a line that fails sometimes, a server, and an operation that fails sometimes,
// step a task each in its own time. In the end every task is settled once and released once.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 20_000, func(seed uint64) error {
		if fault := schedule(rand.New(rand.NewPCG(seed, 0))); fault != "" {
			return errors.New(fault)
		}
		return nil
	})
}

// schedule lives one task's life, and says what is wrong with it.
func schedule(random *rand.Rand) (fault string) {
	m := Mode(random.IntN(int(Answered|Retained|Lent) + 1))
	s := New(m)
	count := map[Effects]int{}
	step := func(e Event) bool {
		next, out := s.Step(e)
		if fault == "" {
			fault = broken(s, e, next, out)
		}
		s = next
		for f := Refused; f <= Settle; f <<= 1 {
			if out&f != 0 {
				count[f]++
			}
		}
		return out&Refused == 0
	}
	sender := []Event{Queue, Move, either(random, Sent, SendFailed)}
	if random.IntN(2) == 0 {
		sender = append([]Event{Encode, either(random, Encoded, EncodeFailed)}, sender...)
	}
	actors := [][]Event{sender, {Arrive, either(random, Answer, GiveUp)}, {Confirm}}
	for range 40 {
		i := random.IntN(len(actors))
		if len(actors[i]) > 0 && possible(s, actors[i][0]) && step(actors[i][0]) {
			actors[i] = actors[i][1:]
		}
		if random.IntN(40) == 0 {
			step(Abandon)
		}
	}
	for _, e := range []Event{Abandon, Encoded, Sent, Answer, Confirm} { // what has begun ends
		if possible(s, e) {
			step(e)
		}
	}
	if fault == "" && (count[Settle] != 1 || count[Release] != 1) {
		fault = fmt.Sprintf("%v: settled %d times, released %d times", s, count[Settle], count[Release])
	}
	return fault
}

// either is the first event mostly.
func either(random *rand.Rand, mostly, sometimes Event) Event {
	if random.IntN(5) == 0 {
		return sometimes
	}
	return mostly
}

func TestAStepDoesNotAllocate(t *testing.T) {
	if n := testing.AllocsPerRun(100, func() {
		s := New(Answered | Retained)
		for _, e := range []Event{Encode, Encoded, Queue, Move, Sent, Arrive, Answer, Confirm, Abandon} {
			s, _ = s.Step(e)
		}
	}); n > 0 {
		t.Errorf("%v allocations in a task's life", n)
	}
}
