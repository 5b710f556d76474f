//go:build !invariants

package lockorder

import "sync"

// Mutex is a sync.Mutex with a place.
type Mutex struct{ sync.Mutex }

// Place gives the lock its level and the name that a violation is reported with. Before its first use.
func (*Mutex) Place(Level, string) {}

// RWMutex is a sync.RWMutex with a place.
type RWMutex struct{ sync.RWMutex }

// Place gives the lock its level and the name that a violation is reported with. Before its first use.
func (*RWMutex) Place(Level, string) {}
