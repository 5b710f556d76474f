package condition

import "time"

// Supersteps are the models with a barrier at the end of stretches in which workers run freely
// (adaptive, elastic). Progress counts supersteps there, and a key's machine runs BSP over them: of
// what a worker pushes in a superstep only the last push goes through it. When that is, one decider of
// the job says for all shards, which alone would choose different barriers (package core/superstep).
type Supersteps interface {
	// Rule makes the rule by which the decider of one group of values decides.
	Rule() Rule
	// Asks reports whether the end of a superstep's iteration of this number, from 1, can make a barrier due
	// at once: then the rank asks the decider, and pushes when it is answered.
	Asks(iteration uint64) bool
	String() string
}

// Rule says where a superstep ends: a function of the strides, with memory that it uses again.
type Rule interface {
	// Due reports whether the end of the superstep can be said now. Then Stop of every stride that has not
	// ended is the rank's last iteration: Done at least where the rank waits, else more. A rank that hears of
	// it too late stops with the iteration that it is in.
	Due(live []Stride) bool
	// Thresholds are those by which the rule has answered last; zeros where it has none.
	Thresholds() Adaptive
}

// Stride is how far one live rank is.
type Stride struct {
	Report
	Done  uint64        // iterations of the superstep that the rank has ended
	Gap   time.Duration // between its newest two ends in the superstep; 0 before
	Waits bool          // it has asked whether iteration Done was its last
	Ended bool          // it has ended the superstep, and Done counts for the next
	Stop  uint64        // its last iteration, once that is decided
}
