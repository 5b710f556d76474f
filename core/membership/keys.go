package membership

import (
	"iter"
	"maps"
	"slices"

	"github.com/paceline/paceline/internal/each"
)

// Tensor is a declared tensor and the servers of its partitions. It never changes: an operation keeps the one that it
// began with, and an epoch in which a key lies elsewhere has another.
type Tensor struct {
	Number  uint32 // never given twice in a round
	Name    Name
	Parts   []uint32 // bytes of each partition
	Servers []int    // index of the server of each; that of partition 0 is the home server of the name
	Near    bool     // its servers are near to its bytes, and a remap leaves them
	Fixed   bool     // they have of it what an elastic job cannot move, or it is not worth it
}

// stays reports whether a remap leaves a partition on its server, if that stays.
func (t *Tensor) stays() bool { return t.Near || t.Fixed }

// key is one partition of the tensor.
func (t *Tensor) key(part int) Key { return Key{t.Name, t.Number, part} }

// Key is one partition of a tensor.
type Key struct {
	Name   Name
	Number uint32 // of the tensor
	Part   int
}

// Name is what all ranks call a tensor. Tensors of one name have one home server, which detects ranks that use it
// differently.
type Name struct {
	Set  uint32 // process set
	Name string
}

// Keys is the declared tensors of an epoch by their numbers. The zero value is empty. Only the declarer of tensors
// reads and changes it.
type Keys struct{ tensors map[uint32]*Tensor }

// Of is the tensor of a number, nil if there is none.
func (k *Keys) Of(number uint32) *Tensor { return k.tensors[number] }

// Put adds a tensor, or replaces its placement.
func (k *Keys) Put(t *Tensor) {
	if k.tensors == nil {
		k.tensors = map[uint32]*Tensor{}
	}
	k.tensors[t.Number] = t
}

// Remove removes a tensor.
func (k *Keys) Remove(number uint32) { delete(k.tensors, number) }

// Len is how many tensors there are.
func (k *Keys) Len() int { return len(k.tensors) }

// all lists the tensors by their numbers.
func (k *Keys) all() []*Tensor {
	return each.Of(slices.Sorted(maps.Keys(k.tensors)), k.Of)
}

// Each yields the tensors by their numbers.
func (k *Keys) Each() iter.Seq[*Tensor] { return slices.Values(k.all()) }

// Move is a key that goes from one server to another.
type Move struct {
	Number   uint32 // of the tensor
	Part     int
	From, To int // indices of servers, in the epochs before and after
}

// Moves is which keys of one epoch lie elsewhere in a later one: on another server, or on another process in the same
// place. Tensors that only one of the two knows do not move.
func Moves(before, after *Epoch) []Move {
	var moves []Move
	for _, t := range before.Keys.all() {
		next := after.Keys.Of(t.Number)
		if next == nil || next == t {
			continue
		}
		for part, from := range t.Servers {
			if to := next.Servers[part]; to != from || before.Servers[from].Incarnation != after.Servers[to].Incarnation {
				moves = append(moves, Move{t.Number, part, from, to})
			}
		}
	}
	return moves
}
