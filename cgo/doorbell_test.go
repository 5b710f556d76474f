package main

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/paceline/paceline/worker"
)

var looked sync.Once

// begin has the doorbell answered, and waits until nobody serves, whose first look comes unasked.
func begin(t *testing.T) {
	t.Helper()
	looked.Do(func() {
		atomic.StoreInt32(word(&shared.rung), 1)
		answer()
		within(t, "the goroutine at the doorbell looks", func() bool { return atomic.LoadInt32(word(&shared.rung)) == 0 })
	})
	left.serving.Lock()
	bare := len(left.bare)
	left.serving.Unlock()
	if bare > 0 {
		t.Fatalf("%d places without spares", bare)
	}
}

// leave does what pl_leave does while the engine holds something, so that nothing rings. It gives the handle.
func leave(t *testing.T) int32 {
	t.Helper()
	first := atomic.AddUint32(count(&shared.first), 1) - 1
	if first == atomic.LoadUint32(count(&shared.end)) {
		t.Fatal("no spare")
	}
	l := &shared.left[shared.spares[first%uint32(len(shared.spares))]]
	l.request.left, l.request.ops, l.op.size = l, &l.op, 0
	h := int32(l.handle) // the engine's again once it is queued
	openHandle(h, 1)
	atomic.AddInt32(word(&shared.untaken), 1)
	at := (*unsafe.Pointer)(unsafe.Pointer(&shared.requests))
	l.request.next = (*request)(atomic.LoadPointer(at))
	atomic.StorePointer(at, unsafe.Pointer(&l.request))
	return h
}

// within waits for what another goroutine does.
func within(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// What is left while the engine holds something rings for nobody: the engine looks when it holds nothing any more.
func TestWhatIsLeftIsTakenWhenTheEngineHoldsNothing(t *testing.T) {
	begin(t)
	gathering(worker.Gathering{Held: true})
	handles := []int32{leave(t), leave(t)}
	gathering(worker.Gathering{Held: true, Bytes: 1})
	if !anyLeft() {
		t.Fatal("taken while the engine holds something")
	}
	gathering(worker.Gathering{})
	within(t, "what was left is taken", func() bool { return !anyLeft() })
	for _, h := range handles {
		process.table.mu.Lock()
		e, err := process.table.book.find(h)
		process.table.mu.Unlock()
		if err != nil || !errors.Is(e.err, worker.ErrShutdown) {
			t.Errorf("handle %d without an engine: %v, %+v", h, err, e)
		}
	}
}

// What comes after operations that were left, on the way into Go, comes after them.
func TestWhatIsLeftIsTakenBeforeWhatEntersGo(t *testing.T) {
	begin(t)
	gathering(worker.Gathering{Held: true})
	defer gathering(worker.Gathering{})
	for name, enter := range map[string]func(){
		"submission": func() { goSubmit(nil, 0, nil) },
		"flush":      func() { goFlush(0) },
		"others":     func() { goTimelineStop() },
		"shutdown":   func() { goShutdown() },
	} {
		leave(t)
		if enter(); anyLeft() {
			t.Errorf("%s: an operation is still left", name)
		}
	}
}

// Each operation that is taken makes room for another, with a handle of its own.
func TestSparesComeBack(t *testing.T) {
	begin(t)
	gathering(worker.Gathering{Held: true})
	defer gathering(worker.Gathering{})
	seen := map[int32]bool{}
	for range 3 {
		for range shared.spares {
			h := leave(t)
			if seen[h] {
				t.Fatalf("handle %d was given twice", h)
			}
			seen[h] = true
		}
		takeLeft()
	}
}
