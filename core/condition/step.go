package condition

import (
	"fmt"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
)

// Input is one event of a key. Make it with Push, Pull, Live, SetPull or SetPush.
type Input struct {
	kind         inputKind
	rank         int
	progress     uint64
	significance float32
	live         rankset.Set
	pull         PullCondition
	push         PushCondition
}

type inputKind uint8

const (
	inPush inputKind = iota + 1
	inPull
	inLive
	inSetPull
	inSetPush
)

// Push is the arrival of a complete push of iteration progress. A rank pushes a key's iterations in rising
// order and may skip some.
func Push(rank int, progress uint64, significance float32) Input {
	return Input{kind: inPush, rank: rank, progress: progress, significance: significance}
}

// Pull is a rank's request for the result of iteration progress.
func Pull(rank int, progress uint64) Input {
	return Input{kind: inPull, rank: rank, progress: progress}
}

// Live changes the membership: the key no longer waits for ranks outside the set, their complete pushes still
// count, and their parked pulls are answered like the others'. A rank that joins (again) starts at the open
// iteration.
func Live(set rankset.Set) Input { return Input{kind: inLive, live: set} }

// SetPull replaces the pull condition. One that the key's dataflow cannot serve is refused, and the
// old one stays.
func SetPull(c PullCondition) Input { return Input{kind: inSetPull, pull: c} }

// SetPush replaces the push condition. One that the live ranks cannot satisfy is refused, and the old one
// stays.
func SetPush(c PushCondition) Input { return Input{kind: inSetPush, push: c} }

// OutputKind is the action that the machine's owner has to take.
type OutputKind uint8

// Outputs. Their order within one Step: the input's own, then for each iteration that closes its Advance
// and the answers that it releases, then answers that a change of membership or condition releases.
const (
	// Admit: add the push of Rank to iteration Progress.
	Admit OutputKind = iota + 1
	// Drop: the push came late, for an iteration that closed without it, or from a rank that is not
	// live. It is never added.
	Drop
	// Duplicate: Rank pushed Progress, or has a pull of it parked, already. Ignore this one.
	Duplicate
	// Park: the pull waits; its Answer comes later.
	Park
	// Answer: send Rank the result of iteration Progress (accumulate: the value as it is now).
	Answer
	// Advance: iteration Progress is closed; Contributors pushed it.
	Advance
	// Refuse: the input has no effect, for the reason Err.
	Refuse
)

var outputNames = [...]string{"", "admit", "drop", "duplicate", "park", "answer", "advance", "refuse"}

func (k OutputKind) String() string { return units.Text(outputNames[:], "output", k) }

// Output is one action for the machine's owner.
type Output struct {
	Kind     OutputKind
	Rank     int    // -1 in Advance and in a Refuse of a condition
	Progress uint64 // the push's or pull's; in Advance the iteration that closed
	// Contributors of an Advance: every rank whose push was admitted, lost ones too; its Len is the
	// divisor. The set is the machine's and changes with the next Step: Clone it to keep it.
	Contributors rankset.Set
	Err          error // of a Refuse
}

func (o Output) String() string {
	switch o.Kind {
	case Advance:
		return fmt.Sprintf("advance past iteration %d, contributors %v", o.Progress, o.Contributors)
	case Refuse:
		return fmt.Sprintf("refuse: %v", o.Err)
	default:
		return fmt.Sprintf("%v rank %d iteration %d", o.Kind, o.Rank, o.Progress)
	}
}
