package scheduler

import "github.com/paceline/paceline/internal/lockorder"

// The one lock of the scheduler: the machine belongs to the loop. Nobody closes a connection while holding it.
const (
	levelDoors lockorder.Level = iota + 1 // Scheduler.mu: who may still come in
)
