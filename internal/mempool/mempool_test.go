package mempool

import (
	"math/rand/v2"
	"sync"
	"testing"
)

func TestBuffersComeBackAndAreCounted(t *testing.T) {
	p := New(1 << 20)
	a, err := p.Get(5000)
	if err != nil || len(a) != 5000 || p.Lent() != 8192 {
		t.Fatalf("got %d bytes, %d lent, %v", len(a), p.Lent(), err)
	}
	p.Put(a)
	b, _ := p.Get(8000)
	if &a[0] != &b[0] {
		t.Fatal("a kept buffer of the same class should be lent again")
	}
}

func TestLimitHoldsAndKeptMemoryGivesWay(t *testing.T) {
	p := New(64 << 10)
	a, _ := p.Get(32 << 10)
	p.Put(a)
	b, err := p.Get(64 << 10) // only fits once the kept 32 KiB are dropped
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Get(1); err == nil {
		t.Fatal("the limit must hold")
	}
	p.Put(b)
	p.Release()
	if p.kept != 0 || p.Lent() != 0 {
		t.Fatalf("kept %d, lent %d", p.kept, p.Lent())
	}
}

// TestWhatIsCededTakesNoRoom, and comes back where there is some.
func TestWhatIsCededTakesNoRoom(t *testing.T) {
	p, dropped := New(64<<10), 0
	p.Make, p.Drop = func(n int) []byte { return make([]byte, n) }, func([]byte) { dropped++ }
	a, _ := p.Get(64 << 10)
	p.Cede(a)
	b, err := p.Get(64 << 10)
	if err != nil {
		t.Fatal("what was ceded takes room:", err)
	}
	if p.Regain(a); dropped != 1 || p.kept != 0 || p.Lent() != 64<<10 {
		t.Errorf("without room: %d dropped, %d kept, %d lent", dropped, p.kept, p.Lent())
	}
	p.Cede(b)
	if p.Regain(b); dropped != 1 || p.kept != 64<<10 || p.Lent() != 0 {
		t.Errorf("with room: %d dropped, %d kept, %d lent", dropped, p.kept, p.Lent())
	}
}

// TestWhatNobodyNeedsForSomeTimeIsFreed, and nothing else: not the buffers that each step borrows.
func TestWhatNobodyNeedsForSomeTimeIsFreed(t *testing.T) {
	p := New(1 << 30)
	take := func(n, bytes int) {
		var all [][]byte
		for range n {
			b, err := p.Get(bytes)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b)
		}
		for _, b := range all {
			p.Put(b)
		}
	}
	take(10, 1<<20)
	take(3, 4<<10)
	for i, want := range []int64{10<<20 + 12<<10, 2<<20 + 8<<10, 2<<20 + 8<<10} {
		if p.Rest(); p.kept != want {
			t.Errorf("after %d calls %d bytes are kept, want %d", i+1, p.kept, want)
		}
		take(2, 1<<20) // a step
		take(2, 4<<10)
	}
	p.Rest()
	if p.Rest(); p.kept != 0 || p.Lent() != 0 {
		t.Errorf("%d bytes are kept when nobody borrows, %d are lent", p.kept, p.Lent())
	}
}

func TestEmptyBuffersCostNothing(t *testing.T) {
	p := New(0)
	b, err := p.Get(0)
	if err != nil {
		t.Fatal(err)
	}
	p.Put(b)
}

func TestMoreThanTheLargestBufferIsAnError(t *testing.T) {
	if b, err := New(1 << 40).Get(3 << 30); err == nil {
		t.Errorf("lends %d bytes", len(b))
	}
}

// TestTheBooksBalance borrows and returns from many goroutines: the limit always holds, no buffer has two
// borrowers, and at the end all are returned.
func TestTheBooksBalance(t *testing.T) {
	const limit = 1 << 20
	p := New(limit)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 0))
			var mine [][]byte
			for range 2000 {
				if b, err := p.Get(random.IntN(200 << 10)); err == nil && len(b) > 0 {
					b[0], b[len(b)-1] = byte(g), byte(g)
					mine = append(mine, b)
				}
				if lent := p.Lent(); lent > limit {
					t.Errorf("%d bytes lent, limit %d", lent, limit)
				}
				for len(mine) > random.IntN(4) {
					b := mine[len(mine)-1]
					mine = mine[:len(mine)-1]
					if b[0] != byte(g) || b[len(b)-1] != byte(g) {
						t.Error("a buffer was lent twice")
					}
					if random.IntN(2) == 0 {
						p.Put(b)
					} else {
						p.Cede(b)
						p.Regain(b)
					}
				}
			}
			for _, b := range mine {
				p.Put(b)
			}
		})
	}
	wg.Wait()
	if p.Lent() != 0 || p.kept > limit {
		t.Errorf("%d bytes did not come back, %d are kept, limit %d", p.Lent(), p.kept, limit)
	}
	p.Release()
	if p.kept != 0 {
		t.Errorf("%d bytes are kept after all were let go", p.kept)
	}
}

// TestEvictionServesGetAlone evicts expendable buffers for Get, and not for Spare.
func TestEvictionServesGetAlone(t *testing.T) {
	p := New(64 << 10)
	var spare [][]byte
	p.Evict = func() bool {
		if len(spare) == 0 {
			return false
		}
		p.Put(spare[0])
		spare = spare[1:]
		return true
	}
	for range 4 {
		b, err := p.Spare(16 << 10)
		if err != nil {
			t.Fatal(err)
		}
		spare = append(spare, b)
	}
	if _, err := p.Spare(1); err == nil || len(spare) != 4 {
		t.Fatalf("%d of 4 spare buffers are left after %v", len(spare), err)
	}
	if _, err := p.Get(32 << 10); err != nil || len(spare) != 2 {
		t.Fatalf("%d of 4 spare buffers are left, want 2, after %v", len(spare), err)
	}
	if _, err := p.Get(64 << 10); err == nil || p.Lent() != 32<<10 {
		t.Fatalf("%d bytes are lent after %v, want those that do not give way", p.Lent(), err)
	}
}

func TestWhatIsChargedCountsLikeBuffers(t *testing.T) {
	p := New(64 << 10)
	evictions := 0
	spare, _ := p.Get(32 << 10)
	p.Evict = func() bool {
		if evictions++; evictions > 1 {
			return false
		}
		p.Put(spare)
		return true
	}
	if err := p.Charge(40 << 10); err != nil || p.Lent() != 40<<10 {
		t.Fatalf("%d in use after an eviction: %v", p.Lent(), err)
	}
	if _, err := p.Get(32 << 10); err == nil {
		t.Error("a buffer goes beyond the limit")
	}
	if err := p.Charge(24<<10 + 1); err == nil || p.Lent() != 40<<10 {
		t.Errorf("%d in use beyond the limit: %v", p.Lent(), err)
	}
	p.Refund(40 << 10)
	if p.Lent() != 0 {
		t.Errorf("%d in use when all is given back", p.Lent())
	}
}

// TestMemoryThatIsMadeSettles: buffers of two sizes in turn, each up to the limit, have nothing made or dropped in the long run.
func TestMemoryThatIsMadeSettles(t *testing.T) {
	p := New(64 << 10)
	made, dropped := 0, 0
	p.Make = func(n int) []byte { made++; return make([]byte, n) }
	p.Drop = func([]byte) { dropped++ }
	borrow := func(bytes, times int) {
		var mine [][]byte
		for range times {
			if b, err := p.Spare(bytes); err == nil {
				mine = append(mine, b)
			}
		}
		for _, b := range mine {
			p.Put(b)
		}
	}
	step := func() {
		borrow(4<<10, 16)
		borrow(32<<10, 2)
	}
	for range 10 {
		step()
	}
	settled := made + dropped
	step()
	if made+dropped != settled || p.Lent() != 0 || p.kept > 64<<10 {
		t.Errorf("%d buffers were made and dropped in 10 steps, %d in 11; %d lent, %d kept", settled, made+dropped, p.Lent(), p.kept)
	}
}
