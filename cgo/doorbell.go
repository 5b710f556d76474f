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
		go hear(os.NewFile(uintptr(fd), "doorbell"))
	}
})

func hear(bell *os.File) {
	var rings [8]byte
	for {
		_, err := bell.Read(rings[:])
		if err != nil { // the program has closed it
			C.pl_doorbell_lost()
		}
		goServe()
		if err != nil {
			return
		}
	}
}

// goServe does all that callers have asked.
//
//export goServe
func goServe() {
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
