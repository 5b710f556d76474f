package main

/*
#include "doorbell.h"
*/
import "C"

import (
	"os"
	"sync"
)

// answer has a goroutine serve what callers ask by the doorbell, from the first job of the process on. Without a descriptor for
// it callers enter Go themselves.
var answer = sync.OnceFunc(func() {
	if fd := C.pl_doorbell_open(); fd >= 0 {
		go serve(os.NewFile(uintptr(fd), "doorbell"))
	}
})

func serve(bell *os.File) {
	var rings [8]byte
	for {
		if _, err := bell.Read(rings[:]); err != nil {
			panic("the doorbell cannot be read: " + err.Error()) // an eventfd that nobody closes
		}
		var flushes C.int32_t
		r := C.pl_asked(&flushes)
		for r != nil {
			next := r.next // once it is answered, it may be gone
			C.pl_answer(r, statusOf(submit(r.ops, r.count, r.handles)))
			r = next
		}
		if flushes != 0 {
			flush(flushes&C.PL_FLUSH_AWAITED != 0)
		}
	}
}
