package held

import (
	"testing"

	"github.com/paceline/paceline/internal/mempool"
)

// Memory is short while one copy is in use: the other is evicted, and the one in use stays.
func TestACopyInUseIsNotEvicted(t *testing.T) {
	pool := mempool.New(16 << 10)
	c := NewCopies(pool)
	pool.Evict = c.Evict
	add := func() *reference {
		r, err := c.add(2<<10, func([]byte) error { return nil })
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	used, idle := add(), add()
	err := c.use(used, func([]byte) error {
		if _, err := pool.Get(8 << 10); err != nil || c.evicted(used) || !c.evicted(idle) {
			t.Fatalf("%v; in use: evicted %v, idle: %v", err, c.evicted(used), c.evicted(idle))
		}
		if _, err := pool.Get(8 << 10); err == nil || c.evicted(used) {
			t.Fatalf("a copy in use was evicted (%v)", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Get(8 << 10); err != nil || c.Len() != 0 {
		t.Fatalf("%v; %d copies are left", err, c.Len())
	}
	if err := c.use(used, func([]byte) error { return nil }); err == nil {
		t.Error("an evicted copy is used")
	}
}
