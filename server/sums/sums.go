// Package sums is the server's room for what is summed: it adds the pushes of a key as they arrive, and answers every
// rank with the same bytes when the key's condition closes the iteration.
//
// Reading order: sums.go (a tensor's keys), key.go (a request's way, under the key's lock), iterations.go (what the
// machine decides), slot.go (the bytes of one iteration), coded.go (messages), residual.go (what a checkpoint has).
package sums

import (
	"fmt"
	"maps"
	"slices"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Room sums the partitions of one tensor that lie on this server.
type Room struct {
	t *room.Tensor

	mu   lockorder.Mutex
	keys map[uint32]*key
}

// New makes the room of a tensor.
func New(t *room.Tensor) *Room {
	x := &Room{t: t, keys: map[uint32]*key{}}
	x.mu.Place(room.LevelParts, "sums.Room.mu")
	return x
}

// Serve takes in a request. An error is of a peer that does not keep to the protocol.
func (x *Room) Serve(q *room.Request) error {
	if q.Type == wire.TypePull {
		return fmt.Errorf("pull of %q, which is no value that servers hold", x.t.Name)
	}
	k, err := x.key(q.Part)
	if err != nil {
		return err
	}
	switch q.Type {
	case wire.TypePush:
		return k.push(q)
	case wire.TypeState:
		return k.state(q)
	case wire.TypeRestore:
		return k.restore(q)
	default:
		return fmt.Errorf("%v of %q, which is summed", q.Type, x.t.Name)
	}
}

// key finds or makes the key of one partition.
func (x *Room) key(part uint32) (*key, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if k := x.keys[part]; k != nil {
		return k, nil
	}
	if x.t.Kind.HasRoot() {
		return nil, fmt.Errorf("%q is a %v, which sums nothing", x.t.Name, x.t.Kind)
	}
	k, err := newKey(x.t, part)
	if err == nil {
		x.keys[part] = k
	}
	return k, err
}

func (x *Room) all() []*key {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Values(x.keys))
}

// Live tells every key who takes part in it now.
func (x *Room) Live() {
	for _, k := range x.all() {
		k.live()
	}
}

// Cancel gives up every iteration from this one on. Operations of the worker in this process end with err.
func (x *Room) Cancel(from uint64, err error) {
	for _, k := range x.all() {
		k.cancel(from, err)
	}
}

// WaitsFor lists the counts of the operations that wait for a rank.
func (x *Room) WaitsFor(rank int) (seqs []uint64) {
	for _, k := range x.all() {
		seqs = append(seqs, k.waitsFor(rank)...)
	}
	return seqs
}

// Change has every key make a change of conditions.
func (x *Room) Change(c room.Change) {
	for _, k := range x.all() {
		k.change(c)
	}
}

// Count is the number of keys, and of iterations that the furthest rank has pushed of one of them.
func (x *Room) Count() (keys int, pushed uint64) {
	all := x.all()
	for _, k := range all {
		pushed = max(pushed, k.pushed())
	}
	return len(all), pushed
}

// Tally is what the keys' machines have counted.
func (x *Room) Tally() (sum room.Tally) {
	for _, k := range x.all() {
		sum.Add(k.tally())
	}
	return sum
}
