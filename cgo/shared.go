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

	"github.com/paceline/paceline/internal/forked"
	"github.com/paceline/paceline/worker"
)

// shared is the engine's side of what handles.h describes. Nothing here calls C, and no system call is one that Go's scheduler
// hears of.
var shared = &C.pl_shared

func init() {
	forked.Use(unsafe.Slice((*forked.Socket)(unsafe.Pointer(&C.pl_sockets)), C.PL_SOCKETS), (*forked.Memory)(unsafe.Pointer(&C.pl_memory)))
}

// request is operations to submit.
type request = C.pl_request

func word(at *C.int32_t) *int32 { return (*int32)(at) }

func count(at *C.uint32_t) *uint32 { return (*uint32)(at) }

// wake wakes the threads that sleep on a word, which need not exist any more.
func wake(at unsafe.Pointer) {
	const wakes, private = 1, 128 // FUTEX_WAKE, FUTEX_PRIVATE_FLAG
	_, _, _ = unix.RawSyscall(unix.SYS_FUTEX, uintptr(at), wakes|private, math.MaxInt32)
}

// gathering is told by the engine what becomes of operations. Once nothing is held, callers ring for what they leave: what they
// have left before is taken now (pl_leave says why none is missed). The engine's lock is held, so another goroutine takes it.
func gathering(g worker.Gathering) {
	atomic.StoreInt64((*int64)(&shared.gathers), int64(g.Bytes))
	atomic.StoreInt32(word(&shared.holding), int32(number(g.Held)))
	if !g.Held && anyLeft() && atomic.SwapInt32(word(&shared.rung), 1) == 0 {
		go goServe()
	}
}

// anyLeft reports whether callers have left operations that are not submitted yet.
func anyLeft() bool { return atomic.LoadInt32(word(&shared.untaken)) != 0 }

// taken notes that an operation that was left is submitted, or refused.
func taken() { atomic.AddInt32(word(&shared.untaken), -1) }

// mayLeave says whether callers may leave operations.
func mayLeave(may bool) { atomic.StoreInt32(word(&shared.leaves), int32(number(may))) }

// putSpare lets callers leave an operation, by its place among shared.left.
func putSpare(place int, handle int32) {
	l := &shared.left[place]
	l.handle = C.int32_t(handle)
	end := atomic.LoadUint32(count(&shared.end))
	atomic.StoreInt32(word(&shared.spares[end%C.PL_LEFT]), int32(place))
	atomic.StoreUint32(count(&shared.end), end+1)
}

// placeOf finds where an operation that was left lies.
func placeOf(l *C.pl_left) int {
	return int((uintptr(unsafe.Pointer(l)) - uintptr(unsafe.Pointer(&shared.left[0]))) / unsafe.Sizeof(*l))
}

// openHandle is called for one handle at a time. Its state is to be PL_PENDING, or where it is not given out yet PL_ERR_INVALID.
func openHandle(h, state int32) {
	atomic.StoreInt32(word(&shared.handles[h].state), state)
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
