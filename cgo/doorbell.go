package main

/*
#include "handles.h"
*/
import "C"

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/worker"
)

// answer has a goroutine serve what callers ask by the doorbell, from the first job of the process on. Without a descriptor for
// it callers enter Go themselves.
var answer = sync.OnceFunc(func() {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return
	}
	bell := os.NewFile(uintptr(fd), "doorbell")
	raw, err := bell.SyscallConn()
	if err != nil {
		return
	}
	for place := range left.entries {
		left.bare = append(left.bare, place)
	}
	restock() // nobody serves yet
	atomic.StoreInt32(word(&shared.bell), int32(fd))
	go func() {
		_ = raw.Read(func(uintptr) bool { // each ring is one event for the poller, so nobody reads
			goServe()
			return false
		})
	}()
})

// left are the operations that callers may leave (pl_leave). One goroutine at a time serves: else one that finds the queue empty
// could submit a thread's next operation before another has submitted what the thread left before.
var left struct {
	serving sync.Mutex
	entries [C.PL_LEFT]*entry // whose handles they have
	bare    []int             // places for which there was no handle
}

// goServe does all that callers have asked, the earliest first.
//
//export goServe
func goServe() {
	if flushes := serve(); flushes != 0 {
		flush(flushes&C.PL_FLUSH_AWAITED != 0)
	}
}

func serve() (flushes int32) {
	left.serving.Lock()
	defer left.serving.Unlock()
	latest, flushes := asked()
	var r *request
	for latest != nil {
		next := latest.next
		latest.next, r, latest = r, latest, next
	}
	for r != nil {
		next := r.next // once it is answered, it may be gone
		if r.left != nil {
			take(r.left)
		} else {
			reply(r, int32(statusOf(submit(r.ops, r.count, r.handles))))
		}
		r = next
	}
	restock()
	return flushes
}

// takeLeft submits what callers have left by now, before something that comes after it.
func takeLeft() {
	if anyLeft() {
		goServe()
	}
}

// take submits an operation that a caller has left, or ends it with what is wrong with it.
func take(l *C.pl_left) {
	place := placeOf(l)
	e := left.entries[place]
	if err := submitLeft(&l.op, e); err != nil {
		e.end(worker.Output{}, err)
	}
	taken()
	left.bare = append(left.bare, place)
	restock()
}

func submitLeft(op *C.pl_op, e *entry) error {
	w, err := running()
	if err != nil {
		return fmt.Errorf("%w: an operation was submitted while the engine was shut down", worker.ErrShutdown)
	}
	g := groups.Get().(*group)
	defer g.rest()
	if err := g.read(op, 1, w.Settings.Rank); err != nil {
		return invalid(err)
	}
	g.ops[0].Done = e.end
	return w.Engine.Submit(g.ops)
}

// restock puts spares where there were some, as far as there are handles for them.
func restock() {
	for last := len(left.bare) - 1; last >= 0; last-- {
		e, err := process.table.reserve()
		if err != nil {
			return // callers are told when they ask
		}
		place := left.bare[last]
		left.bare = left.bare[:last]
		left.entries[place] = e
		putSpare(place, e.handle)
	}
}
