package main

import (
	"runtime"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/paceline/paceline/worker"
)

// pl_shutdown returns after the last call of a caller's function: no thread sees an operation end that finds no call in the queue then.
func TestAnOperationEndsWithItsCallInTheQueue(t *testing.T) {
	e, err := process.table.reserve()
	if err != nil {
		t.Fatal(err)
	}
	openHandle(e.handle, 1)
	*(*unsafe.Pointer)(unsafe.Pointer(&e.done.call)) = unsafe.Pointer(&shared.ended) // no function, and so
	var ends table
	ends.calls.running = true // nobody calls it
	ended := func() bool { return atomic.LoadInt32(word(&shared.handles[e.handle].state)) != 1 }
	ends.calls.mu.Lock()
	go ends.finish(e, worker.Output{}, nil)
	for range 10000 {
		if runtime.Gosched(); ended() {
			t.Fatal("ended while nothing can be put into the queue")
		}
	}
	ends.calls.mu.Unlock()
	within(t, "the operation ends", ended)
	ends.calls.mu.Lock()
	defer ends.calls.mu.Unlock()
	if len(ends.calls.queue) != 1 {
		t.Errorf("%d calls in the queue", len(ends.calls.queue))
	}
}
