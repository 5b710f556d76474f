package server

import (
	"errors"
	"sync"

	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/server/room"
)

// base is what some ranks have of a value: float32 elements, lent. Ranks that have been told the same have the
// same one, and what is said to one of them is said to all.
//
// Invariant: uses counts the ranks that have it, the base whose told leads to it, and the value whose whole it is.
type base struct {
	mu       sync.Mutex // taken after the value's, while elements are used
	elements []byte     // nil once it has given way

	// Guarded by the value's mu.
	number uint32 // tells it from the value's others
	uses   int
	told   *told // what its ranks hear of the value as it is; nil before the first asks
}

// told is what the ranks with a base hear of one version of the value.
type told struct {
	message *room.Buffer // the difference; nil for nothing that is worth sending
	next    *base        // what they have then; nil for the same
	at      uint64       // V of then, by which the gate decides
}

// bases are those of all values. They give way to what cannot be done without.
type bases struct {
	mu   sync.Mutex
	all  map[*base]struct{}
	pool *mempool.Pool
}

var errNoBase = errors.New("its base has given way")

// add makes a base that has one use, with arbitrary elements. Its mutex is held, so that it does not give way before
// the caller has set them.
func (s *bases) add(elements int) (*base, error) {
	b, err := s.pool.Spare(4 * elements)
	if err != nil {
		return nil, err
	}
	n := &base{elements: b, uses: 1}
	n.mu.Lock()
	s.mu.Lock()
	s.all[n] = struct{}{}
	s.mu.Unlock()
	return n, nil
}

// giveWay lets go of one that nobody uses now, and reports whether there was one.
func (s *bases) giveWay() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.all {
		if b.mu.TryLock() { // never waits: the caller may hold the one that is in use
			s.drop(b)
			b.mu.Unlock()
			return true
		}
	}
	return false
}

// drop takes a base's memory back. Callers hold both mutexes.
func (s *bases) drop(b *base) {
	delete(s.all, b)
	s.pool.Put(b.elements)
	b.elements = nil
}

// remove lets a base go that nobody has any more.
func (s *bases) remove(b *base) {
	b.mu.Lock()
	s.mu.Lock()
	s.drop(b)
	s.mu.Unlock()
	b.mu.Unlock()
}

// gone reports whether the base has given way.
func (b *base) gone() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.elements == nil
}
