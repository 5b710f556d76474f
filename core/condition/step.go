package condition

import (
	"fmt"

	"github.com/paceline/paceline/internal/rankset"
)

// Input is one thing that happens to a key. Make it with Push, Pull, Live, SetPull or SetPush.
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

// Push is the arrival of a whole push of iteration progress. A rank pushes a key's iterations in
// rising order; it may leave some out.
func Push(rank int, progress uint64, significance float32) Input {
	return Input{kind: inPush, rank: rank, progress: progress, significance: significance}
}

// Pull is a rank's wish for the result of iteration progress.
func Pull(rank int, progress uint64) Input {
	return Input{kind: inPull, rank: rank, progress: progress}
}

// Live changes the membership: ranks outside the set no longer hold anything up, what they pushed
// whole still counts, and pulls they have parked are answered like the others'. A rank that comes
// (again) starts at the open iteration.
func Live(set rankset.Set) Input { return Input{kind: inLive, live: set} }

// SetPull replaces the pull condition. One that the key's dataflow cannot serve is refused, and the
// old one stays.
func SetPull(c PullCondition) Input { return Input{kind: inSetPull, pull: c} }

// SetPush replaces the push condition. One that the live ranks could not meet is refused, and the old
// one stays.
func SetPush(c PushCondition) Input { return Input{kind: inSetPush, push: c} }

// OutputKind says what the owner of the machine has to do.
type OutputKind uint8

// Outputs. Of one Step they come in this order: what becomes of the input itself, then for each
// iteration that closes its Advance and the answers that it sets free, then answers that a change of
// membership or condition sets free.
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
	// Refuse: the input was not taken, and Err says why.
	Refuse
)

var outputNames = [...]string{"", "admit", "drop", "duplicate", "park", "answer", "advance", "refuse"}

func (k OutputKind) String() string {
	if k == 0 || int(k) >= len(outputNames) {
		return fmt.Sprintf("output(%d)", uint8(k))
	}
	return outputNames[k]
}

// Output is one thing to do for the owner of the machine.
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
