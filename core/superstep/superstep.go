// Package superstep is both halves of a barrier that falls where a rule says (the adaptive model and ElasticBSP), as pure
// machines: a Decider beside the first value of a group, which hears of every rank's iterations and says where each
// rank's superstep ends, and a Worker on each rank, which reports and stops there. Both take frames late and in any
// order. The server, the worker and the simulator drive the same code; time is given by the caller, from an origin of
// its own.
//
//	Worker  → Decider   Report: an iteration has ended; it is the superstep's last, or the rank asks whether it is
//	Decider → Worker    Stop: the iteration that is the rank's last; or an answer: the superstep goes on
//
// A rank asks where the rule says that the end of its iteration can make a barrier due (condition.Supersteps.Asks),
// and pushes when it is answered. So the rank whose iteration makes a barrier due stops with that iteration, and
// nobody leads by more than the rule allows.
package superstep

import (
	"time"

	"github.com/paceline/paceline/core/condition"
)

// Report is a rank's message at the end of an iteration of a superstep.
type Report struct {
	Rank      int
	Superstep uint64
	Iteration uint64        // of the superstep, from 1
	Interval  time.Duration // that it took, without waits; 0: not known
	Occupancy float64       // of the rank's processors, 0 to 1
	Last      bool          // the rank's superstep ends with it
	Empty     bool          // with Last: it ends without an iteration more, because the rank does not come to the barrier
	Asks      bool          // the rank waits for a Stop
}

// Stop is the decider's message to one rank: where its superstep ends.
type Stop struct {
	Rank       int
	Superstep  uint64
	Iteration  uint64               // of it, from 1, that is the rank's last; 0: the superstep goes on
	Asked      uint64               // the iteration at whose end the rank asked, where it waits for an answer; else 0
	Thresholds condition.Thresholds // by which that is decided; zeros where the rule has none
}
