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

// table holds the results of operations for the caller, behind one lock, and the functions to call at their ends.
type table struct {
	mu    sync.Mutex
	book  book
	calls calls
}

// rested is how many handles lie released before one is used again. A stale handle is recognised meanwhile, instead of
// standing for another operation.
const rested = 1 << 16

// book maps handles to entries. Handles are used again in the order of their release.
type book struct {
	free    []int32  // released, oldest first
	entries []*entry // by handle, nil for those that are released; as many as were ever used
	spare   []*entry
}

// spares is how many entries are kept for later operations.
const spares = 4096

// entry is the operation that a handle stands for.
type entry struct {
	handle   int32
	end      func(worker.Output, error) // is finish, of this entry
	done     done
	ended    bool
	out      worker.Output
	err      error
	crows    *C.int64_t // a copy of out.Rows for the caller
	fetched  bool       // the caller owns out.Data
	released bool       // done has still to return
}

// open opens an entry for each operation; dones has the functions to call at their ends.
func (t *table) open(dones []done, opened []*entry) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.book.collect()
	return t.book.open(dones, opened)
}

// reserve opens the entry of an operation that a caller may leave. Who leaves it gives its handle the state of one in flight.
func (t *table) reserve() (*entry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.book.collect()
	if err := t.book.room(1); err != nil {
		return nil, err
	}
	return t.book.enter(done{}, C.PL_ERR_INVALID), nil
}

// finish records how an operation ended, then wakes the threads that wait for it.
func (t *table) finish(e *entry, out worker.Output, err error) {
	status := C.int32_t(C.PL_OK)
	if err != nil {
		status = statusOf(err)
	}
	t.mu.Lock()
	defer t.mu.Unlock() // when the handle has its state: no other thread can release it before
	d, h := e.done, e.handle
	e.ended, e.out, e.err = true, out, err
	if d.call != nil {
		t.calls.add(call{d, h, status, t})
	} else {
		finishHandle(h, int32(status))
	}
}

// get finds the entry of an operation that has ended.
func (t *table) get(h C.int32_t) (*entry, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.book.collect()
	return t.book.find(int32(h))
}

// release frees the outputs and the handles of finished operations, all that it can. The error is the first one's.
func (t *table) release(handles []C.int32_t) (err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.book.collect()
	for _, h := range handles {
		if failed := t.book.release(int32(h)); err == nil {
			err = failed
		}
	}
	return err
}

// called records that an operation's done has returned.
func (t *table) called(h int32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.book.called(h)
}

// forget releases every handle whose operation has ended: those of a round that is over.
func (t *table) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.book.collect()
	for h, e := range t.book.entries {
		if e != nil && e.ended && !e.released {
			_ = t.book.release(int32(h)) // it is one that may be released
		}
	}
}

// discard releases entries whose operations were not started.
func (t *table) discard(opened []*entry) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, e := range opened {
		closeHandle(e.handle)
		t.book.reuse(e)
	}
}

func (b *book) open(dones []done, opened []*entry) error {
	if err := b.room(len(dones)); err != nil {
		return err
	}
	for i := range opened {
		opened[i] = b.enter(dones[i], C.PL_PENDING)
	}
	return nil
}

// room finds out whether there are n more handles.
func (b *book) room(n int) error {
	if len(b.free)+C.PL_HANDLES-len(b.entries) < n {
		return fmt.Errorf("%w: %d handles are in use; synchronise and release some", worker.ErrMemory, C.PL_HANDLES)
	}
	return nil
}

// enter opens an entry, for which there is room.
func (b *book) enter(d done, state int32) *entry {
	e := b.entry()
	if len(b.entries) < C.PL_HANDLES && len(b.free) < rested {
		e.handle = int32(len(b.entries))
		b.entries = append(b.entries, nil)
	} else {
		e.handle = b.free[0]
		b.free = b.free[1:]
	}
	e.done = d
	b.entries[e.handle] = e
	openHandle(e.handle, state)
	return e
}

// entry is one that is not in use.
func (b *book) entry() *entry {
	if last := len(b.spare) - 1; last >= 0 {
		e := b.spare[last]
		b.spare = b.spare[:last]
		return e
	}
	e := new(entry)
	e.end = func(out worker.Output, err error) { process.table.finish(e, out, err) }
	return e
}

func (b *book) find(h int32) (*entry, error) {
	if h >= 0 && int(h) < len(b.entries) {
		if e := b.entries[h]; e != nil && e.ended && !e.released {
			return e, nil
		}
	}
	return nil, fmt.Errorf("%w: handle %d has no finished operation", worker.ErrInvalid, h)
}

// release lets the number be used again, unless the handle's done has still to return.
func (b *book) release(h int32) error {
	e, err := b.find(h)
	if err != nil {
		return err
	}
	if !e.fetched && e.out.Data != nil {
		C.pl_free(unsafe.Pointer(unsafe.SliceData(e.out.Data)))
	}
	if e.crows != nil {
		C.pl_free(unsafe.Pointer(e.crows))
	}
	closeHandle(h)
	if e.released = true; e.done.call == nil {
		b.reuse(e)
	}
	return nil
}

// collect releases the handles that callers have released without entering Go.
func (b *book) collect() {
	for h := range releasedHandles {
		_ = b.release(h) // it is one that may be released
	}
}

func (b *book) called(h int32) {
	e := b.entries[h]
	if e.done = (done{}); e.released {
		b.reuse(e)
	}
}

// reuse makes an entry and its number available to later operations.
func (b *book) reuse(e *entry) {
	b.entries[e.handle] = nil
	b.free = append(b.free, e.handle)
	if *e = (entry{end: e.end}); len(b.spare) < spares {
		b.spare = append(b.spare, e)
	}
}
