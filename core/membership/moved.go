package membership

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// Moved is where the scheduler of an elastic job has moved keys whose servers stayed (decision 99): the last move of each. It never changes;
// an epoch with further moves has another. The zero value has none.
type Moved struct {
	times uint32 // how often the scheduler has moved keys: which of two is later
	to    map[place]int
}

type place struct {
	number uint32 // of the tensor
	part   int
}

// MovedBy makes the moves as they travel: From is not used.
func MovedBy(times uint32, moves []Move) Moved {
	m := Moved{times: times, to: make(map[place]int, len(moves))}
	for _, move := range moves {
		m.to[place{move.Number, move.Part}] = move.To
	}
	return m
}

// Times is how often the scheduler has moved keys.
func (m Moved) Times() uint32 { return m.times }

// All lists the moves by tensors and partitions, without From.
func (m Moved) All() []Move {
	all := make([]Move, 0, len(m.to))
	for at, to := range m.to {
		all = append(all, Move{Number: at.number, Part: at.part, To: to})
	}
	slices.SortFunc(all, func(a, b Move) int { return cmp.Or(cmp.Compare(a.Number, b.Number), cmp.Compare(a.Part, b.Part)) })
	return all
}

// Moved is where keys have been moved until the epoch.
func (e *Epoch) Moved() Moved { return e.moved }

// Elsewhere reports whether the scheduler has moved a key, and it is not on this server.
func (e *Epoch) Elsewhere(k Key, server int) bool {
	_, moved := e.moved.to[place{k.Number, k.Part}]
	return moved && e.Heir(k, server) != server
}

// follow takes later moves over.
func (e *Epoch) follow(m Moved) error {
	if m.times <= e.moved.times {
		return nil
	}
	for at, to := range m.to {
		if to < 0 || to >= len(e.Servers) {
			return fmt.Errorf("partition %d of tensor %d was moved to server %d, of %d", at.part, at.number, to, len(e.Servers))
		}
	}
	e.moved = m
	return nil
}

// move has the policy decide on tensors, which have live servers, and records what moves.
func (d *Dealer) move(tensors []*Tensor, c Change) error {
	live := func(s int) bool { return d.epoch.Servers[s].State == Live }
	if err := d.remap(tensors, c, live); err != nil {
		return err
	}
	to := maps.Clone(d.epoch.moved.to)
	if to == nil {
		to = map[place]int{}
	}
	maps.DeleteFunc(to, func(at place, _ int) bool { return d.epoch.Keys.Of(at.number) == nil }) // it is used no more
	times := d.epoch.moved.times
	for _, t := range tensors {
		for part, s := range d.epoch.Keys.Of(t.Number).Servers {
			if s != t.Servers[part] {
				to[place{t.Number, part}], times = s, d.epoch.moved.times+1
			}
		}
	}
	if times > d.epoch.moved.times {
		d.epoch.moved = Moved{times, to}
	}
	return nil
}
