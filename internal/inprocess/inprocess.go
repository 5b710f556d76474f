// Package inprocess holds what a worker and the server in its process exchange without the network.
package inprocess

import (
	"errors"

	"github.com/paceline/paceline/internal/units"
)

// ErrCancelled ends an abandoned operation on the server in the worker's process. Its reason arrives as a separate
// failure.
var ErrCancelled = errors.New("the operation was given up")

// Failure is why a sum that the server has handed to the worker has no result.
type Failure struct {
	Code units.FailureCode
	Text string
}

func (f Failure) Error() string { return f.Text }
