package main

/*
#include "handles.h"
*/
import "C"

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
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
	atomic.StoreInt32(word(&shared.bell), int32(fd))
	go func() {
		_ = raw.Read(func(uintptr) bool { // each ring is one event for the poller, so nobody reads
			goServe()
			return false
		})
	}()
})

// goServe does all that callers have asked, the earliest first.
//
//export goServe
func goServe() {
	latest, flushes := asked()
	var r *request
	for latest != nil {
		next := latest.next
		latest.next, r, latest = r, latest, next
	}
	for r != nil {
		next := r.next // once it is answered, it may be gone
		reply(r, int32(statusOf(submit(r.ops, r.count, r.handles))))
		r = next
	}
	if flushes != 0 {
		flush(flushes&C.PL_FLUSH_AWAITED != 0)
	}
}
