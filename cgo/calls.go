package main

/*
#include "handles.h"
*/
import "C"

import "sync"

// done is the function that a caller wants called when an operation ends; the zero done calls nothing. The caller may
// pass any value as its argument, which is why it is no pointer here: Go's runtime stops a program in whose stack it
// finds a pointer to what cannot be memory.
type done struct {
	call C.pl_done_fn
	arg  C.uintptr_t
}

// calls runs callers' functions one after the other on a goroutine of its own, so that a function that is slow, or
// submits the next operation, delays no connection and no other operation. The goroutine ends when the queue is empty.
type calls struct {
	mu      sync.Mutex
	queue   []call
	running bool
	idle    *sync.Cond // nil until wait is called
}

type call struct {
	done
	handle int32
	status C.int32_t
	table  *table
}

// add wakes who waits for an operation that has a function, and queues that. The lock is held meanwhile: a thread that is woken and shuts
// down finds the function in the queue, and the function an operation that has ended.
func (c *calls) add(one call) {
	c.mu.Lock()
	defer c.mu.Unlock()
	finishHandle(one.handle, int32(one.status))
	c.queue = append(c.queue, one)
	if !c.running {
		c.running = true
		go c.run()
	}
}

func (c *calls) run() {
	var batch []call
	for {
		batch = c.swap(batch[:0])
		if len(batch) == 0 {
			return
		}
		for _, one := range batch {
			C.pl_handle_done(one.call, one.arg, C.int32_t(one.handle), one.status)
			one.table.called(one.handle)
		}
	}
}

// swap exchanges the queue for an empty one. If the queue is empty too, run must end.
func (c *calls) swap(empty []call) []call {
	c.mu.Lock()
	defer c.mu.Unlock()
	batch := c.queue
	c.queue = empty
	if len(batch) == 0 {
		c.running = false
		if c.idle != nil {
			c.idle.Broadcast()
		}
	}
	return batch
}

// wait returns when all functions have returned.
func (c *calls) wait() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle == nil {
		c.idle = sync.NewCond(&c.mu)
	}
	for c.running {
		c.idle.Wait()
	}
}
