package mempool

import "testing"

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

func TestEmptyBuffersCostNothing(t *testing.T) {
	p := New(0)
	b, err := p.Get(0)
	if err != nil {
		t.Fatal(err)
	}
	p.Put(b)
}
