// Package condition decides, for one key, when a push counts, when an iteration closes and when a
// pull is answered. It is FluentPS's server side (section III) as a pure machine:
// Step(input) → outputs, with no data, no I/O and no clock. The server's rooms (server/sums, server/held),
// which hold the bytes, and the simulator drive the same code.
//
// A synchronisation model is a pull condition and a push condition. Each model is one file here and
// one line in the table of models.go; a user's own is any pair of values of the two interfaces.
package condition

import "github.com/paceline/paceline/internal/units"

// View is a condition's input: the rank that asks, and the progress of all. Progress counts from 0. V,
// Fastest and Slowest are numbers of iterations: V are closed, and the fastest live rank has pushed
// iterations up to Fastest-1 (0 before its first push). So a worker whose progress is i leads by i-V.
type View struct {
	Rank         int     // that pulls or has just pushed; -1 at a change of membership or condition
	Progress     uint64  // of that pull or push; V when Rank is -1
	V            uint64  // iterations closed; also the number of the iteration that is open
	N            int     // live ranks
	Fastest      uint64  // iterations that the furthest live rank has pushed
	Slowest      uint64  // iterations that the least advanced live rank has pushed
	Significance float32 // |g|/|w| of Rank's newest push, 0 where the worker did not compute it

	count func(iteration uint64) int
}

// Count is the number of live ranks that have pushed an iteration which is not closed yet.
func (v View) Count(iteration uint64) int {
	if v.count == nil {
		return 0
	}
	return v.count(iteration)
}

// PullCondition decides whether a pull may be answered now. It is evaluated when the pull arrives and again
// whenever the membership or a condition changes, and must depend only on the view.
type PullCondition interface {
	Holds(v View) bool
	// Ahead reports whether the condition may hold before the pull's own iteration is closed. Then
	// there is no finished sum to answer with, and the key must accumulate.
	Ahead() bool
	String() string
}

// PushCondition decides whether the open iteration v.V closes now. It is evaluated after each push and
// whenever the membership or a condition changes, and must depend only on the view. An iteration without a push
// stays open whatever the condition.
type PushCondition interface {
	Holds(v View) bool
	String() string
}

// Dataflow is the kind of a key's content. The tensor's declaration fixes it.
type Dataflow uint8

// Dataflows.
const (
	// Aggregate keys hold the sum of one iteration: push a gradient, pull that iteration's sum.
	Aggregate Dataflow = iota
	// Accumulate keys hold the value: push a difference, pull the value as it is now.
	Accumulate
)

func (d Dataflow) String() string {
	return units.Text([]string{"aggregate", "accumulate"}, "dataflow", d)
}

// Parking is the order in which delayed pulls are answered (FluentPS section III-C).
type Parking uint8

// Parking orders.
const (
	// Lazy files a pull under its own progress: it is answered when V passes that, with a fresh value.
	Lazy Parking = iota
	// SoftBarrier files a pull under the current V: it is answered at the next advance,
	// unconditionally, with the value at that time.
	SoftBarrier
)

func (p Parking) String() string { return units.Text([]string{"lazy", "soft-barrier"}, "parking", p) }
