package control

import "github.com/paceline/paceline/internal/lockorder"

// All locks of a line to the scheduler, in the order in which they are locked. No callback and no connection is used
// while one is held.
const (
	levelClient lockorder.Level = iota + 1 // Client.mu: the line, what waits for answers, what the scheduler has said
	levelLine                              // Line.mu: what waits to be sent
)
