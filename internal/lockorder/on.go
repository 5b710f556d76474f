//go:build invariants

package lockorder

import (
	"fmt"
	"sync"

	"github.com/petermattis/goid"
)

// place is a lock's level and name.
type place struct {
	level Level
	name  string
}

// Place gives the lock its level and the name that a violation is reported with. Before its first use.
func (p *place) Place(level Level, name string) { p.level, p.name = level, name }

// Mutex is a lock with a place. That nobody reads by it, builds without the tag check.
type Mutex = RWMutex

// RWMutex is a sync.RWMutex with a place. Reading counts like writing: a reader that waits behind a writer
// deadlocks in the same way.
type RWMutex struct {
	mu sync.RWMutex
	place
}

// Lock locks for writing, and panics where the goroutine holds a lock of the same level or of a greater one.
func (m *RWMutex) Lock() {
	m.acquire()
	m.mu.Lock()
}

// Unlock ends Lock, and panics where another goroutine has locked.
func (m *RWMutex) Unlock() {
	m.release()
	m.mu.Unlock()
}

// RLock locks for reading.
func (m *RWMutex) RLock() {
	m.acquire()
	m.mu.RLock()
}

// RUnlock ends RLock.
func (m *RWMutex) RUnlock() {
	m.release()
	m.mu.RUnlock()
}

// held lists the placed locks of each goroutine in the order of acquisition.
var held = struct {
	sync.Mutex
	of map[int64][]*place
}{of: map[int64][]*place{}}

func (p *place) acquire() {
	if p.level == 0 {
		return
	}
	id := goid.Get()
	held.Lock()
	defer held.Unlock()
	for _, h := range held.of[id] {
		if h.level >= p.level {
			panic(fmt.Sprintf("lock order broken: %s (level %d) is taken while %s (level %d) is held", p.name, p.level, h.name, h.level))
		}
	}
	held.of[id] = append(held.of[id], p)
}

func (p *place) release() {
	if p.level == 0 {
		return
	}
	id := goid.Get()
	held.Lock()
	defer held.Unlock()
	locks := held.of[id]
	for i := len(locks) - 1; i >= 0; i-- {
		if locks[i] != p {
			continue
		}
		if len(locks) == 1 {
			delete(held.of, id)
		} else {
			held.of[id] = append(locks[:i], locks[i+1:]...)
		}
		return
	}
	panic(fmt.Sprintf("lock order broken: %s is released by a goroutine that does not hold it", p.name))
}
