package room

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Shell is what a room needs of the round that it serves, for one tensor. A room calls it without holding a lock of its
// own, but for Joined and Left.
type Shell interface {
	// Joined are the job's ranks that have no more data, Left those that have shut down, or that an elastic job has lost. Both sets are shared: do not
	// change them.
	Joined() rankset.Set
	Left() rankset.Set
	// Fail ends an operation, by its count, on every rank of the tensor. Text is the reason.
	Fail(seq uint64, code units.FailureCode, text string)
	// Refuse ends an operation on one rank and nobody else.
	Refuse(rank int, seq uint64, code units.FailureCode, text string)
	// Drop lets go of what is held for the tensor from an iteration on.
	Drop(iteration uint64)
	// Forget takes back that a rank has come to an operation, by its count, of a key that has been moved from here.
	Forget(seq uint64)
	// Warn tells a rank, for its log, whom its operation waits for.
	Warn(rank int, missing rankset.Set, waited time.Duration)
	// Stop tells a rank where its superstep ends.
	Stop(rank int, h wire.Header, at wire.Stop)
}

// Round is what all rooms of one round go by.
type Round struct {
	Pool          *mempool.Pool
	Log           *zap.Logger
	RankOrder     bool            // sum in rank order, so that runs repeat bit for bit
	Elastic       bool            // the job goes on without ranks that have gone
	Seed          uint64          // of the random numbers that codecs draw
	Model         condition.Model // of tensors that are declared without one
	StallWarning  time.Duration
	StallShutdown time.Duration
	Membership    *membership.View
	Here          int // index of this server
	Hosts         Hosts
	Leaves        atomic.Bool // it is about to leave an elastic job, and has given away what only it had
}

// WaitingBytes is what a server's memory limit is charged with for each request that waits: what is noted of it, and of
// what it waits for. Ranks may ask for what never comes.
const WaitingBytes = 512

// MemoryError is the server's memory limit as the reason of a failure.
type MemoryError struct{ Err error }

func (e MemoryError) Error() string {
	return fmt.Sprintf("the server's memory limit is reached (%v): raise PACELINE_SERVER_MEMORY or use more servers", e.Err)
}

// CodeOf is the code that an error travels with.
func CodeOf(err error) units.FailureCode {
	if errors.As(err, new(MemoryError)) {
		return units.FailMemory
	}
	var above inprocess.Failure
	if errors.As(err, &above) {
		return above.Code
	}
	return units.FailUnsupported
}
