// Package inprocess holds what a worker and the server in its process exchange without the network.
package inprocess

import "errors"

// ErrCancelled ends an abandoned operation on the server in the worker's process. Its reason arrives as a separate
// failure.
var ErrCancelled = errors.New("the operation was given up")
