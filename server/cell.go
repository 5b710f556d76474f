package server

import (
	"sync"

	"github.com/paceline/paceline/core/condition"
)

// cell is what a tensor has of one partition: a key or a value.
type cell interface {
	live()
	cancel(from uint64, err error)
	waitsFor(rank int) (seqs []uint64)
	tally() condition.Tally
	pushedSoFar() uint64
	change(change)
}

// decided is what keys and values have in common: a machine that decides, and the lock that they change under.
type decided struct {
	t     *tensor
	part  uint32
	bytes int // of the partition, in the tensor's type

	coding *coding // nil for plain

	mu      sync.Mutex
	machine *condition.Machine
	outputs []condition.Output
	changes []change // of conditions, that wait for their iteration
}

// tally is what the machine has counted.
func (d *decided) tally() condition.Tally {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.machine.Tally()
}

// pushedSoFar is the number of iterations that the furthest rank has pushed.
func (d *decided) pushedSoFar() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.machine.Fastest()
}
