package server

import (
	"testing"

	"github.com/paceline/paceline/internal/mempool"
)

// TestBasesGiveWay runs out of memory while one base is in use: the other goes, and the one in use stays.
func TestBasesGiveWay(t *testing.T) {
	pool := mempool.New(16 << 10)
	s := &bases{all: map[*base]struct{}{}, pool: pool}
	pool.GiveWay = s.giveWay
	var used, idle base
	for _, b := range []*base{&used, &idle} {
		elements, err := pool.Spare(8 << 10)
		if err != nil {
			t.Fatal(err)
		}
		b.elements, s.all[b] = elements, struct{}{}
	}
	used.mu.Lock()
	if _, err := pool.Get(8 << 10); err != nil || used.elements == nil || idle.elements != nil {
		t.Fatalf("%v; in use: %d bytes, idle: %d", err, len(used.elements), len(idle.elements))
	}
	if _, err := pool.Get(8 << 10); err == nil || used.elements == nil {
		t.Fatalf("a base in use gave way (%v)", err)
	}
	used.mu.Unlock()
	if _, err := pool.Get(8 << 10); err != nil || len(s.all) != 0 {
		t.Fatalf("%v; %d bases are left", err, len(s.all))
	}
}
