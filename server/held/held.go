// Package held is the server's room for values that the servers hold: ranks add differences to them, and read them as
// they are when the machine lets them (the dataflow "accumulate" of core/condition).
//
// Reading order: held.go (a tensor's values), value.go (a request's way, under the value's lock), readers.go (what the
// machine decides), contents.go (the bytes), deltas.go (how coded values are read), uses.go (who uses a copy), copies.go (the reference copies of all
// values), decider.go (supersteps), tuner.go (conditions that follow the workers), inherited.go (values of servers that are lost), moved.go (values that
// leave).
package held

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Room holds the values of one tensor's partitions that lie on this server.
type Room struct {
	*room.Partitions[*value]
	t      *room.Tensor
	copies *Copies
	tuners *Tuners

	mu      lockorder.Mutex
	decider *decider // of supersteps; nil where another tensor has it, or the model has none

	forgotten sync.Map // rank → count of the newest operation that it has given up
}

// New makes the room of a tensor. All values of a server share its copies, all of a round its tuners.
func New(t *room.Tensor, copies *Copies, tuners *Tuners) *Room {
	x := &Room{t: t, copies: copies, tuners: tuners}
	x.Partitions = room.NewPartitions(func(part uint32) (*value, error) { return newValue(x, part) })
	x.mu.Place(room.LevelParts, "held.Room.mu")
	return x
}

// Serve handles a request. An error is of a peer that does not keep to the protocol.
func (x *Room) Serve(q *room.Request) error {
	switch {
	case q.Type == wire.TypePush || q.Type == wire.TypePull:
	case (q.Type == wire.TypeCover || q.Type == wire.TypeSupply) && x.t.Carried():
	default:
		return fmt.Errorf("%v of %q, a value that servers hold", q.Type, x.t.Name)
	}
	v, err := x.Part(q.Part)
	if errors.Is(err, inprocess.ErrCancelled) {
		q.Reply.Fail(err)
		return nil
	} else if err != nil {
		return err
	}
	switch q.Type {
	case wire.TypePush:
		return v.push(q)
	case wire.TypeCover:
		return v.covers(q)
	case wire.TypeSupply:
		return v.supply(q)
	}
	v.pull(q)
	return nil
}

// SendAway sends a request back whose value has been moved to another server.
func (x *Room) SendAway(q *room.Request) error {
	q.Moved()
	return nil
}

// Leave gives the values that lie here to their ranks, because the server is about to leave. Nobody is served any more.
func (x *Room) Leave(func(rank int) room.Sender) {
	for _, v := range x.All() {
		v.mu.Lock()
		var replies []reply
		if v.state.inherited.begun() && !v.state.over {
			replies = v.state.give(nil)
		}
		for _, r := range v.state.cancel() { // who waits asks the heir
			r.drop(v.Round.Pool)
		}
		v.mu.Unlock()
		for i := range replies {
			replies[i].leaving = wire.FlagLast
		}
		v.deliver(replies)
	}
}

// UpdateMembership tells every value, and the decider beside them, who takes part now.
func (x *Room) UpdateMembership() {
	x.Partitions.UpdateMembership()
	x.mu.Lock()
	if x.t.Elsewhere(0) { // there is another one, which begins anew
		x.decider = nil
	}
	d := x.decider
	x.mu.Unlock()
	if d != nil {
		d.updateMembership()
	}
}

// WaitsFor lists nothing: nobody waits for one rank's part of a held value for ever; who leaves no longer counts.
func (x *Room) WaitsFor(int) []uint64 { return nil }

// Cancel gives the values up, whatever the iteration: the tensor is not used any more. Operations of the worker in this
// process end with err.
func (x *Room) Cancel(_ uint64, err error) {
	for _, v := range x.All() {
		v.cancel(err)
	}
}

// Forget drops what a rank waits for, which has given it up with this operation. The value itself goes with
// a declaration that has failed: it does so on every rank.
func (x *Room) Forget(rank int, seq uint64, failed bool) {
	x.forgotten.Store(rank, seq) // for what is on its way to the value
	for _, v := range x.All() {
		if failed && !v.opened() {
			v.cancel(inprocess.ErrCancelled)
		}
		for _, r := range v.forget(rank, seq) {
			r.drop(v.Round.Pool)
			r.to.Fail(inprocess.ErrCancelled)
		}
	}
}

// gaveUp reports whether a rank has given up the operation: nobody would answer it.
func (x *Room) gaveUp(r *reader) bool {
	seq, ok := x.forgotten.Load(r.rank)
	return ok && r.h.Seq <= seq.(uint64)
}

// Holds reports whether a value lies here.
func (x *Room) Holds() bool { return slices.ContainsFunc(x.All(), (*value).holds) }

// Waits reports since when ranks wait to read a value, and for whom; not ok where nobody waits.
func (x *Room) Waits() (since time.Time, missing rankset.Set, ok bool) {
	for _, v := range x.All() {
		if s, m, waits := v.waits(); waits && (!ok || s.Before(since)) {
			since, missing, ok = s, m, true
		}
	}
	return since, missing, ok
}

// CheckStalls warns of ranks that wait long for a value, and ends those that wait too long. (Ranks that do
// not come to declare it are found out by the name.)
func (x *Room) CheckStalls(now time.Time) {
	var most *value // one partition speaks for all
	readers := 0
	for _, v := range x.All() {
		if n := v.waiting(); n > readers {
			most, readers = v, n
		}
	}
	if most == nil {
		return
	}
	missing, slow, ended := most.stalled(now)
	for _, r := range slow {
		x.t.Shell.Warn(r.rank, missing, now.Sub(r.since))
	}
	for _, r := range ended {
		r.drop(x.t.Round.Pool)
		most.refuse(&r, stallError{missing, x.t.Round.StallShutdown})
	}
}
