package server

import (
	"sync"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/server/room"
)

// decided is a machine that decides, and the lock that a value changes under.
type decided struct {
	t     *tensor
	p     *room.Part
	part  uint32
	bytes int // of the partition, in the tensor's type

	coding *coding // nil for plain

	mu      sync.Mutex
	machine *condition.Machine
	outputs []condition.Output
	changes room.Changes // of conditions, that wait for their iteration
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
