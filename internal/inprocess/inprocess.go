// Package inprocess is what a worker and the server in its process say to each other that never travels.
package inprocess

import "errors"

// ErrCancelled ends an operation on the server in the own process that was given up. The reason comes as a failure of
// its own.
var ErrCancelled = errors.New("the operation was given up")
