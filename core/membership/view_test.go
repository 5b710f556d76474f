package membership

import (
	"strings"
	"sync"
	"testing"
)

func found(t testing.TB) *Epoch {
	e, err := Found(7, "", []Node{{Incarnation: 1, Addresses: at("a")}, {Incarnation: 2, Addresses: at("b")}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestAViewTellsOfTheNextEpoch(t *testing.T) {
	v := NewView(found(t))
	first, over := v.Watch()
	select {
	case <-over:
		t.Fatal("the first epoch is over at once")
	default:
	}
	if err := v.Advance(first.Anew()); err != nil {
		t.Fatal(err)
	}
	<-over
	if now, over := v.Watch(); now != v.Now() || now.Number != 1 || over == nil {
		t.Errorf("epoch %d follows epoch 0", now.Number)
	}
}

func TestAViewNeverGoesBack(t *testing.T) {
	v := NewView(found(t))
	next, err := v.Now().Next(Change{Pushed: []uint64{9}})
	if err != nil {
		t.Fatal(err)
	}
	if err := v.Advance(next); err != nil {
		t.Fatal(err)
	}
	other := found(t).Anew().Anew()
	other.Round = 8
	back := found(t).Anew().Anew()
	back.Origin, back.First = 0, 8
	for _, c := range []struct {
		next *Epoch
		want string
	}{
		{next, "epoch 1 does not follow epoch 1"},
		{found(t), "epoch 0 does not follow epoch 1"},
		{other, "epoch 2 of round 0x8 does not follow one of round 0x7"},
		{back, "epoch 2 holds from iteration 8, epoch 1 from 9"},
	} {
		if err := v.Advance(c.next); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got error %v, want one with %q", err, c.want)
		}
	}
	if err := v.Advance(found(t).Anew().Anew().Anew()); err != nil {
		t.Errorf("one that was left out: %v", err)
	}
	old := found(t).Anew().Anew().Anew().Anew()
	old.Origin, old.First = 0, 100
	if err := v.Advance(old); err == nil || !strings.Contains(err.Error(), "epoch 4 counts iterations from epoch 0, epoch 3 from epoch 3") {
		t.Errorf("an older origin: %v", err)
	}
}

// Every operation reads the epoch: at the price of one load, while another goroutine moves it on.
func TestReadingAViewTakesNoMemory(t *testing.T) {
	v := NewView(found(t))
	if n := testing.AllocsPerRun(100, func() { _ = v.Now().Number }); n > 0 {
		t.Errorf("%v allocations", n)
	}
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for last := uint32(0); last < 100; {
				e := v.Now()
				if e.Number < last || len(e.Workers) != 2 {
					t.Errorf("epoch %d with %d workers behind epoch %d", e.Number, len(e.Workers), last)
					return
				}
				last = e.Number
			}
		})
	}
	for range 100 {
		if err := v.Advance(v.Now().Anew()); err != nil {
			t.Fatal(err)
		}
	}
	readers.Wait()
}

func TestAnEpochRemembersSoManyDepartures(t *testing.T) {
	e := found(t)
	e.gone = make([]Departure, keptDepartures)
	next, err := e.Next(Change{Lose: []Loss{{Member: Member{WorkerRole, 1}, Why: "gone"}}})
	if err != nil {
		t.Fatal(err)
	}
	if last := len(next.gone) - 1; last != keptDepartures-1 || next.gone[last].Incarnation != 2 {
		t.Errorf("%d departures, the last is %+v", last+1, next.gone[last])
	}
}
