//go:build race

package shm

import (
	"runtime"
	"unsafe"
)

// The race detector does not see that counters in shared memory order what both ends do, as it does not of a socket's bytes.
// All rings are one to it, as all sockets are to Go's own.
var order byte

func released() { runtime.RaceReleaseMerge(unsafe.Pointer(&order)) }
func acquired() { runtime.RaceAcquire(unsafe.Pointer(&order)) }
