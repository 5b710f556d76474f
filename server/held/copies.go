package held

import (
	"errors"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/server/room"
)

// reference is a reference copy: what some ranks have of a value, as float32 elements, lent. Ranks that have been sent
// the same deltas have the same one.
//
// Invariant: users counts the ranks that have it, the reference copy whose delta leads to it, and the value whose whole
// it is.
type reference struct {
	// Guarded by Copies.mu.
	elements []byte // nil once it was evicted
	pinned   bool   // its elements are in use, so that it is not evicted

	// Guarded by the value's mu.
	number uint32 // tells it from the value's others
	users  int
	delta  *delta // to the value as it is; nil before the first rank asks
}

// delta is what the ranks with a reference copy get of one version of the value.
type delta struct {
	message   *room.Buffer // nil for nothing that is worth sending
	next      *reference   // what they have then; nil for the same
	iteration uint64       // of then, by which the gate decides
}

// Copies are the reference copies of all values of a server. They are evicted for what cannot be done without.
type Copies struct {
	pool *mempool.Pool

	mu  lockorder.Mutex
	all map[*reference]struct{}
}

var errEvicted = errors.New("the reference copy was evicted")

// NewCopies makes an empty store. The pool's Evict is to call its Evict.
func NewCopies(pool *mempool.Pool) *Copies {
	c := &Copies{pool: pool, all: map[*reference]struct{}{}}
	c.mu.Place(room.LevelCopies, "held.Copies.mu")
	return c
}

// Len is the number of copies that are kept.
func (c *Copies) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.all)
}

// add makes a reference copy with one user, whose elements fill sets.
func (c *Copies) add(elements int, fill func(b []byte) error) (*reference, error) {
	b, err := c.pool.Spare(4 * elements)
	if err != nil {
		return nil, err
	}
	if err := fill(b); err != nil {
		c.pool.Put(b)
		return nil, err
	}
	r := &reference{elements: b, users: 1}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[r] = struct{}{}
	return r, nil
}

// use calls f with the elements, which stay until it returns.
func (c *Copies) use(r *reference, f func(elements []byte) error) error {
	elements := c.pin(r, true)
	if elements == nil {
		return errEvicted
	}
	defer c.pin(r, false)
	return f(elements)
}

// pin says whether the elements are in use, and returns them.
func (c *Copies) pin(r *reference, on bool) []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	r.pinned = on
	return r.elements
}

// Evict lets go of one copy that nobody uses now, and reports whether there was one.
func (c *Copies) Evict() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for r := range c.all {
		if !r.pinned {
			c.drop(r)
			return true
		}
	}
	return false
}

// remove lets a copy go that nobody has any more.
func (c *Copies) remove(r *reference) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drop(r)
}

// drop takes a copy's memory back.
func (c *Copies) drop(r *reference) {
	delete(c.all, r)
	c.pool.Put(r.elements)
	r.elements = nil
}

// evicted reports whether the copy is gone.
func (c *Copies) evicted(r *reference) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return r.elements == nil
}
