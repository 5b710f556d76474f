package rankset

import "testing"

func TestSetHoldsWhatWasAdded(t *testing.T) {
	s := Of(0, 63, 64, 200)
	if !s.Has(64) || s.Has(65) || s.Len() != 4 || s.String() != "[0, 63, 64, 200]" {
		t.Fatalf("got %v", s)
	}
	if s.Add(63) || !s.Remove(63) || s.Remove(63) || s.Has(63) || s.Has(-1) {
		t.Fatal("add and remove must report what changed")
	}
}

func TestCoversAndMinus(t *testing.T) {
	all, some := Range(70), Of(1, 69)
	if !all.Covers(some) || some.Covers(all) || !some.Covers(Set{}) {
		t.Fatal("covers is wrong")
	}
	if got := Of(0, 1, 69).Minus(some).String(); got != "[0]" {
		t.Fatalf("minus: got %s", got)
	}
	c := some.Clone()
	c.Reset()
	if some.Len() != 2 || c.Len() != 0 {
		t.Fatal("a clone must share nothing")
	}
}

func TestOverlapAndNamed(t *testing.T) {
	if got := Range(70).Overlap(Of(3, 69, 80)).Named(); got != "ranks 3, 69" {
		t.Fatalf("got %s", got)
	}
	if got := Of(5).Named() + " " + Of(1).Overlap(Set{}).Named(); got != "rank 5 ranks" {
		t.Fatalf("got %s", got)
	}
}
