package scheduler

import "github.com/paceline/paceline/internal/lockorder"

// The one lock of the scheduler: the machine belongs to the loop. No connection is closed while it is held.
const (
	levelDoors lockorder.Level = iota + 1 // Scheduler.mu: listeners and connections that are open
)
