package room

import (
	"slices"

	"github.com/paceline/paceline/core/condition"
)

// Change is a new condition of a partition.
type Change struct {
	At   uint64 // V from which it holds
	In   condition.Input
	Pull *condition.Model // whose pull condition and tuner it brings; nil for another change
	Push *condition.Model // whose push condition it brings; nil for another change
}

// ChangeTo is the change to a model's pull condition, or else to its push condition.
func ChangeTo(m condition.Model, pull bool, at uint64) Change {
	if pull {
		return Change{At: at, In: condition.SetPull(m.Pull), Pull: &m}
	}
	return Change{At: at, In: condition.SetPush(m.Push), Push: &m}
}

// Changes wait for their iteration.
type Changes struct{ waiting []waitingChange }

type waitingChange struct {
	Change
	tuned bool // a tuner's, for the model before it
}

// Add has a change wait.
func (c *Changes) Add(change Change) { c.waiting = append(c.waiting, waitingChange{Change: change}) }

// Retune has a tuner's condition wait. Of several in a row the last stands.
func (c *Changes) Retune(at uint64, in condition.Input) {
	change := waitingChange{Change{At: at, In: in}, true}
	if last := len(c.waiting) - 1; last >= 0 && c.waiting[last].tuned {
		c.waiting[last] = change
	} else {
		c.waiting = append(c.waiting, change)
	}
}

// Due takes the first change out that holds from V on.
func (c *Changes) Due(v uint64) (condition.Input, bool) {
	for i, change := range c.waiting {
		if change.At <= v {
			c.waiting = slices.Delete(c.waiting, i, i+1)
			return change.In, true
		}
	}
	return condition.Input{}, false
}
