package main

/*
#include "handles.h"
*/
import "C"

import (
	"math"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/paceline/paceline/worker"
)

// shared is the engine's side of what handles.h describes. Nothing here calls C, and no system call is one that Go's scheduler
// hears of.
var shared = &C.pl_shared

// request is operations to submit.
type request = C.pl_request

func word(at *C.int32_t) *int32 { return (*int32)(at) }

func count(at *C.uint32_t) *uint32 { return (*uint32)(at) }

// wake wakes the threads that sleep on a word, which need not exist any more.
func wake(at unsafe.Pointer) {
	const wakes, private = 1, 128 // FUTEX_WAKE, FUTEX_PRIVATE_FLAG
	_, _, _ = unix.RawSyscall(unix.SYS_FUTEX, uintptr(at), wakes|private, math.MaxInt32)
}

// gathering is told by the engine what becomes of operations.
func gathering(g worker.Gathering) {
	atomic.StoreInt64((*int64)(&shared.gathers), int64(g.Bytes))
	atomic.StoreInt32(word(&shared.holding), int32(number(g.Held)))
}

// openHandle is called for one handle at a time.
func openHandle(h int32) {
	atomic.StoreInt32(word(&shared.handles[h].state), C.PL_PENDING)
	if h >= atomic.LoadInt32(word(&shared.used)) {
		atomic.StoreInt32(word(&shared.used), h+1)
	}
}

func closeHandle(h int32) { atomic.StoreInt32(word(&shared.handles[h].state), C.PL_ERR_INVALID) }

// finishHandle wakes who waits for an operation.
func finishHandle(h, status int32) {
	handle := &shared.handles[h]
	atomic.StoreInt32(word(&handle.state), status)
	if atomic.LoadInt32(word(&handle.waiters)) > 0 {
		wake(unsafe.Pointer(&handle.state))
	}
	ended := atomic.AddUint32(count(&shared.ended), 1)
	if atomic.LoadInt32(word(&shared.waiters)) > 0 && int32(ended-atomic.LoadUint32(count(&shared.wanted))) >= 0 {
		wake(unsafe.Pointer(&shared.ended))
	}
}

// releasedHandles gives the handles that callers have released, the last one first, until it is told to stop.
func releasedHandles(yield func(int32) bool) {
	for h := atomic.SwapInt32(word(&shared.released), 0) - 1; h >= 0; {
		before := int32(shared.handles[h].before) - 1 // once h is taken back, it may be opened again
		if !yield(h) {
			return
		}
		h = before
	}
}

// asked is all that callers have asked, the latest request first, and whether what is held is to leave.
func asked() (latest *request, flush int32) {
	atomic.StoreInt32(word(&shared.rung), 0)
	flush = atomic.SwapInt32(word(&shared.flushes), 0)
	at := (*unsafe.Pointer)(unsafe.Pointer(&shared.requests))
	return (*request)(atomic.SwapPointer(at, nil)), flush
}

// reply answers a request, which may be gone then. A caller that waits for its operations wakes at their ends: the answer wakes it
// where it comes later, or refuses them.
func reply(r *request, answer int32) {
	waits, ended := r.waits != 0, uint32(r.ended)
	atomic.StoreInt32(word(&r.answer), answer)
	switch {
	case !waits:
		wake(unsafe.Pointer(&r.answer))
	case answer != C.PL_OK || atomic.LoadUint32(count(&shared.ended)) != ended:
		atomic.AddUint32(count(&shared.ended), 1) // a sleep that is about to begin does not
		wake(unsafe.Pointer(&shared.ended))
	}
}
