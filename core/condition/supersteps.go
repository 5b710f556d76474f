package condition

import (
	"fmt"
	"time"
)

// Supersteps are the models with a barrier at the end of stretches in which workers run freely
// (adaptive, elastic). Progress counts supersteps there, and a key's machine runs BSP over them: only
// the last push of a worker in a superstep passes through it. One decider for a group of values chooses that push
// for all their keys: deciders of single keys would choose different barriers (package core/superstep).
type Supersteps interface {
	// Rule makes the rule by which the decider of one group of values decides.
	Rule() Rule
	// Asks reports whether the end of a superstep's iteration with this number, from 1, can make a barrier due
	// at once: then the rank asks the decider, and pushes after the answer.
	Asks(iteration uint64) bool
	String() string
}

// Rule decides where a superstep ends: a function of the strides, with reused memory.
type Rule interface {
	// Due reports whether the end of the superstep is known now. Then Stop of every stride that has not
	// ended is the rank's last iteration: at least Done if the rank waits, else more. A rank that receives it too
	// late stops with its current iteration.
	Due(live []Stride) bool
	// Thresholds are those of the rule's last answer; zeros if it has none.
	Thresholds() Thresholds
}

// Thresholds say at which progress of the ranks a superstep ends, in iterations since the last barrier. Both are at least
// 1, as the adaptive model's paper counts: S = 1 or W = 1 is BSP among equal workers.
type Thresholds struct {
	S uint64 // stale threshold: the lead of the fastest over the slowest at which a barrier is due
	W uint64 // weak threshold: iterations of the slowest at which a barrier is due
}

func (t Thresholds) String() string {
	return fmt.Sprintf("a lead of %d, or the slowest has done %d", t.S, t.W)
}

// Stride is the progress of one live rank.
type Stride struct {
	Report
	Done  uint64        // iterations of the superstep that the rank has ended
	Gap   time.Duration // of an iteration, by its newest two ends in the superstep; 0 before
	Waits bool          // it has asked whether iteration Done is its last
	Ended bool          // it has ended the superstep, and Done counts for the next
	Stop  uint64        // its last iteration, once decided
}
