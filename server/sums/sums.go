// Package sums is the server's room for what is summed: it adds the pushes of a key as they arrive, and answers every
// rank with the same bytes when the key's condition closes the iteration.
//
// Reading order: sums.go (a tensor's keys), key.go (a request's way, under the key's lock), iterations.go (what the
// machine decides), slot.go (the bytes of one iteration), forward.go (what is not added), climb.go (sums of one host), coded.go (messages), residual.go (what a checkpoint has).
package sums

import (
	"fmt"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Room sums the partitions of one tensor that lie on this server.
type Room struct {
	*room.Partitions[*key]
	t *room.Tensor
}

// New makes the room of a tensor.
func New(t *room.Tensor) *Room {
	return &Room{t: t, Partitions: room.NewPartitions(func(part uint32) (*key, error) { return newKey(t, part) })}
}

// Serve handles a request. An error is of a peer that does not keep to the protocol.
func (x *Room) Serve(q *room.Request) error {
	if q.Type == wire.TypePull {
		return fmt.Errorf("pull of %q, which is no value that servers hold", x.t.Name)
	}
	k, err := x.Part(q.Part)
	if err != nil {
		return err
	}
	switch q.Type {
	case wire.TypePush:
		return k.push(q)
	case wire.TypeSupply:
		return k.supply(q)
	case wire.TypeState:
		return k.state(q)
	case wire.TypeRestore:
		return k.restore(q)
	case wire.TypeResidual:
		return k.inherit(q)
	default:
		return fmt.Errorf("%v of %q, which is summed", q.Type, x.t.Name)
	}
}

// SendAway sends a request back whose key has been moved to another server.
func (x *Room) SendAway(q *room.Request) error {
	k, err := x.Part(q.Part)
	if err != nil {
		return err
	}
	return k.sendAway(q)
}

// Leave gives the residual of each key to a rank, because the server is about to leave. Such keys take nothing any more: what has not been answered is pushed at the heir, to
// which the rank brings the residual, ahead of that and of its own question for it.
func (x *Room) Leave(to func(rank int) room.Sender) {
	senders := map[int]room.Sender{}
	var there rankset.Set
	for _, rank := range x.t.Live().Ranks() {
		if sender := to(rank); sender != nil {
			senders[rank] = sender
			there.Add(rank)
		}
	}
	if there.Len() == 0 {
		return
	}
	for _, k := range x.All() {
		residual, carrier, flags := k.leave(there)
		k.carry(residual, room.Reply{To: senders[carrier]}, flags)
	}
}

// Cancel gives up every iteration from this one on. Operations of the worker in this process end with err.
func (x *Room) Cancel(from uint64, err error) {
	for _, k := range x.All() {
		k.cancel(from, err)
	}
}

// WaitsFor lists the counts of the operations that wait for a rank.
func (x *Room) WaitsFor(rank int) (seqs []uint64) {
	for _, k := range x.All() {
		if !k.Confirms() {
			seqs = append(seqs, k.waitsFor(rank)...)
		}
	}
	return seqs
}
