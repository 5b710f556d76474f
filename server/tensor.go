package server

import (
	"fmt"
	"sync"
	"time"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/sums"
	"github.com/paceline/paceline/transport/wire"
)

// tensor is an announced tensor: its keys as far as they lie on this server.
type tensor struct {
	*room.Tensor
	r         *round
	ranks     rankset.Set
	signature string
	agreed    *agreement.Tensor

	sums *sums.Room // empty for what is held

	mu      sync.Mutex
	values  map[uint32]*value // of what is held
	decider *decider          // of supersteps; nil where another tensor has it, or the model has none

	forgotten sync.Map // rank → count of the newest operation on a held value that it has given up
}

// newTensor takes in what a rank says of a tensor.
func newTensor(r *round, t *wire.Tensor) (*tensor, error) {
	n := &tensor{r: r, signature: t.Signature(), values: map[uint32]*value{}}
	var err error
	if n.Tensor, err = room.NewTensor(t, &r.settings, n); err != nil {
		return nil, err
	}
	n.ranks, n.sums = n.Members, sums.New(n.Tensor)
	n.agreed = agreed(n)
	return n, nil
}

// enter notes that a rank comes with a frame of an operation, and reports whether the operation goes on.
func (t *tensor) enter(h *wire.Header) bool {
	return (h.Flags&wire.FlagHome == 0 || t.r.arrive(t, h)) && !t.Gone(h.Iteration)
}

// cancel gives up every iteration from this one on.
func (t *tensor) cancel(from uint64, err error) {
	t.GiveUp(from)
	t.sums.Cancel(from, err)
	for _, v := range t.heldParts() {
		v.cancel(err)
	}
}

// live tells every key who takes part in it now.
func (t *tensor) live() {
	t.sums.Live()
	for _, v := range t.heldParts() {
		v.live()
	}
}

// Joined implements room.Shell.
func (t *tensor) Joined() rankset.Set { return t.r.joinedRanks() }

// Left implements room.Shell.
func (t *tensor) Left() rankset.Set { return t.r.leftRanks() }

// Fail implements room.Shell.
func (t *tensor) Fail(seq uint64, code units.FailureCode, text string) { t.r.fail(t, seq, code, text) }

// Refuse implements room.Shell.
func (t *tensor) Refuse(rank int, seq uint64, code units.FailureCode, text string) {
	t.r.tell([]agreement.Failure{{
		Ranks: rankset.Of(rank), Tensor: t.agreed, Count: seq, Code: code, Text: fmt.Sprintf("%q failed on rank %d: %s", t.Name, rank, text),
	}})
}

// Drop implements room.Shell.
func (t *tensor) Drop(iteration uint64) { t.r.drop(t, iteration) }

// Warn implements room.Shell.
func (t *tensor) Warn(rank int, missing rankset.Set, waited time.Duration) {
	t.r.warn(agreement.Stall{Rank: rank, Name: t.Name, Missing: missing, Waited: waited})
}

// Stop implements room.Shell.
func (t *tensor) Stop(rank int, h wire.Header, at wire.Stop) { t.r.stop(rank, h, at) }
