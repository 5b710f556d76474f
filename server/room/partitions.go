package room

import (
	"maps"
	"slices"

	"github.com/paceline/paceline/internal/lockorder"
)

// Partition is what a room has of one partition of its tensor.
type Partition interface {
	// UpdateMembership says that it has changed who takes part.
	UpdateMembership()
	// Change makes a change of conditions.
	Change(Change)
	// Pushed is the number of iterations that the furthest rank has pushed.
	Pushed() uint64
	// Tally is what it has counted.
	Tally() Tally
}

// Partitions are those of one tensor that lie on this server, each made when it is first asked for.
type Partitions[P Partition] struct {
	create func(number uint32) (P, error)

	mu    lockorder.Mutex
	parts map[uint32]P
}

// NewPartitions makes an empty set. It calls create with its lock held.
func NewPartitions[P Partition](create func(number uint32) (P, error)) *Partitions[P] {
	x := &Partitions[P]{create: create, parts: map[uint32]P{}}
	x.mu.Place(LevelParts, "room.Partitions.mu")
	return x
}

// Part finds or makes one.
func (x *Partitions[P]) Part(number uint32) (P, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if p, ok := x.parts[number]; ok {
		return p, nil
	}
	p, err := x.create(number)
	if err == nil {
		x.parts[number] = p
	}
	return p, err
}

// All are those that there are.
func (x *Partitions[P]) All() []P {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Values(x.parts))
}

// UpdateMembership says that it has changed who takes part.
func (x *Partitions[P]) UpdateMembership() {
	for _, p := range x.All() {
		p.UpdateMembership()
	}
}

// Change has every partition make a change of conditions.
func (x *Partitions[P]) Change(c Change) {
	for _, p := range x.All() {
		p.Change(c)
	}
}

// Count is the number of partitions, and of iterations that the furthest rank has pushed of one of them.
func (x *Partitions[P]) Count() (parts int, pushed uint64) {
	all := x.All()
	for _, p := range all {
		pushed = max(pushed, p.Pushed())
	}
	return len(all), pushed
}

// Tally is what they have counted together.
func (x *Partitions[P]) Tally() (sum Tally) {
	for _, p := range x.All() {
		sum.Add(p.Tally())
	}
	return sum
}
