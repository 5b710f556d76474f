package server

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/held"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/sums"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// tensor is an announced tensor and the room of its keys.
type tensor struct {
	*room.Tensor
	r         *round
	signature string
	agreed    *agreement.Tensor

	keys keys
	held *held.Room // keys, where the servers hold a value; else nil

	ended atomic.Uint64 // iterations before this one ended well where a lost server was the home
}

// keys is the room of a tensor's keys, which sums them or holds their values. What one rank puts for others is in the
// round's transfer room.
type keys interface {
	// Serve handles a request. An error is of a peer that does not keep to the protocol.
	Serve(q *room.Request) error
	// SendAway sends a request back whose partition has been moved to another server. An error is as Serve's.
	SendAway(q *room.Request) error
	// Leave gives what only this server has to the tensor's ranks, by the connections of each, because it is about to leave an elastic job.
	Leave(to func(rank int) room.Sender)
	// UpdateMembership says that it has changed who takes part.
	UpdateMembership()
	// Cancel gives up every iteration from this one on. Operations of the worker in this process end with err.
	Cancel(from uint64, err error)
	// WaitsFor lists the counts of the operations that wait for a rank.
	WaitsFor(rank int) []uint64
	// Change makes a change of conditions.
	Change(c room.Change)
	// Count is the number of keys, and of iterations that the furthest rank has pushed of one of them.
	Count() (keys int, pushed uint64)
	Tally() room.Tally
}

// newTensor reads what a rank says of a tensor.
func newTensor(r *round, t *wire.Tensor) (*tensor, error) {
	n := &tensor{r: r, signature: t.Signature()}
	var err error
	if n.Tensor, err = room.NewTensor(t, &r.settings, n); err != nil {
		return nil, err
	}
	n.agreed = agreed(n)
	if n.Held() {
		n.held = held.New(n.Tensor, r.s.copies, r.tuners)
		n.keys = n.held
	} else {
		n.keys = sums.New(n.Tensor)
	}
	return n, nil
}

// enter notes that a rank comes with a frame of an operation, and reports whether the operation goes on.
func (t *tensor) enter(h *wire.Header) bool {
	return (h.Flags&wire.FlagHome == 0 || h.Iteration < t.ended.Load() || t.r.arrive(t, h)) && !t.Gone(h.Iteration)
}

// holds reports whether a held value lies here.
func (t *tensor) holds() bool { return t.held != nil && t.held.Holds() }

// over notes that all ranks came to an operation whose home was lost since: one supplies its result.
func (t *tensor) over(h *wire.Header) {
	if h.Flags&wire.FlagHome == 0 {
		return
	}
	for have := t.ended.Load(); have <= h.Iteration && !t.ended.CompareAndSwap(have, h.Iteration+1); have = t.ended.Load() {
	}
	t.r.names.step(func(home *agreement.Home) { home.Over(t.agreed, h.Seq) })
}

// cancel gives up every iteration from this one on.
func (t *tensor) cancel(from uint64, err error) {
	t.GiveUp(from)
	t.keys.Cancel(from, err)
}

// Joined implements room.Shell.
func (t *tensor) Joined() rankset.Set { return t.r.joinedRanks() }

// Left implements room.Shell.
func (t *tensor) Left() rankset.Set { return t.r.leftRanks() }

// Fail implements room.Shell.
func (t *tensor) Fail(seq uint64, code units.FailureCode, text string) {
	var failed []agreement.Failure
	t.r.names.step(func(h *agreement.Home) { failed = h.Fail(t.agreed, seq, code, text) })
	t.r.tell(failed)
}

// Refuse implements room.Shell.
func (t *tensor) Refuse(rank int, seq uint64, code units.FailureCode, text string) {
	t.r.tell([]agreement.Failure{{
		Ranks: rankset.Of(rank), Tensor: t.agreed, Count: seq, Code: code, Text: fmt.Sprintf("%q failed on rank %d: %s", t.Name, rank, text),
	}})
}

// Drop implements room.Shell.
func (t *tensor) Drop(iteration uint64) { t.r.drop(t, iteration) }

// Forget implements room.Shell.
func (t *tensor) Forget(seq uint64) {
	t.r.names.step(func(home *agreement.Home) { home.Over(t.agreed, seq) })
}

// Warn implements room.Shell.
func (t *tensor) Warn(rank int, missing rankset.Set, waited time.Duration) {
	t.r.warn(agreement.Stall{Ranks: rankset.Of(rank), Name: t.Name, Missing: missing, Waited: waited})
}

// Stop implements room.Shell.
func (t *tensor) Stop(rank int, h wire.Header, at wire.Stop) {
	t.r.notify(rankset.Of(rank), func(c *conn) { c.send(outbox.Encoded(h, at)) }, func(n Notices) { n.Stopped(h, at) })
}
