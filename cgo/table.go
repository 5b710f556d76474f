package main

/*
#include "handles.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"unsafe"

	"github.com/paceline/paceline/worker"
)

// table holds what operations leave for the caller. Handles are used again in the order in
// which they were released, so that a stale one is noticed rather than taken for another.
type table struct {
	sync.Mutex
	next    int32   // never used from here on
	free    []int32 // released, oldest first
	entries map[int32]*entry
	calls   calls
}

// entry is what a handle stands for.
type entry struct {
	done     done
	ended    bool
	out      worker.Output
	err      error
	crows    *C.int64_t // out.Rows for the caller
	taken    bool
	released bool // while done is still to return
}

// open gives a handle for each operation; dones has what is called at their ends.
func (t *table) open(dones []done) ([]int32, error) {
	t.Lock()
	defer t.Unlock()
	if n := len(dones); len(t.free)+C.PL_HANDLES-int(t.next) < n {
		return nil, fmt.Errorf("%w: %d handles are in use; synchronise and release some", worker.ErrMemory, C.PL_HANDLES)
	}
	if t.entries == nil {
		t.entries = map[int32]*entry{}
	}
	handles := make([]int32, len(dones))
	for i := range handles {
		if t.next < C.PL_HANDLES {
			handles[i] = t.next
			t.next++
		} else {
			handles[i] = t.free[0]
			t.free = t.free[1:]
		}
		t.entries[handles[i]] = &entry{done: dones[i]}
		C.pl_handle_open(C.int32_t(handles[i]))
	}
	return handles, nil
}

// finish notes how an operation ended, then wakes who waits for it.
func (t *table) finish(h int32, out worker.Output, err error) {
	status := C.int32_t(C.PL_OK)
	if err != nil {
		status = statusOf(err)
	}
	t.Lock()
	e := t.entries[h]
	e.ended, e.out, e.err = true, out, err
	d := e.done // who sees the end may release the handle
	t.Unlock()
	C.pl_handle_finish(C.int32_t(h), status)
	if d.call != nil {
		t.calls.add(call{d, h, status, t})
	}
}

// get finds the entry of an operation that has ended.
func (t *table) get(h C.int32_t) (*entry, error) {
	t.Lock()
	defer t.Unlock()
	return t.find(h)
}

func (t *table) find(h C.int32_t) (*entry, error) {
	if e := t.entries[int32(h)]; e != nil && e.ended && !e.released {
		return e, nil
	}
	return nil, fmt.Errorf("%w: handle %d has no finished operation", worker.ErrInvalid, h)
}

// release gives back what a finished operation left and its handle, once. While the handle's done is still to
// return, its number stays in use.
func (t *table) release(h C.int32_t) error {
	t.Lock()
	defer t.Unlock()
	e, err := t.find(h)
	if err != nil {
		return err
	}
	if !e.taken {
		C.pl_free(unsafe.Pointer(unsafe.SliceData(e.out.Data)))
	}
	C.pl_free(unsafe.Pointer(e.crows))
	C.pl_handle_close(h)
	if e.released = true; e.done.call == nil {
		t.reuse(int32(h))
	}
	return nil
}

// called notes that an operation's done has returned.
func (t *table) called(h int32) {
	t.Lock()
	defer t.Unlock()
	e := t.entries[h]
	if e.done = (done{}); e.released {
		t.reuse(h)
	}
}

// discard takes back handles whose operations were not started.
func (t *table) discard(handles []int32) {
	t.Lock()
	defer t.Unlock()
	for _, h := range handles {
		C.pl_handle_close(C.int32_t(h))
		t.reuse(h)
	}
}

// reuse lets a later operation have a number. It is the last step of release, called and discard, in their lock.
func (t *table) reuse(h int32) {
	delete(t.entries, h)
	t.free = append(t.free, h)
}
