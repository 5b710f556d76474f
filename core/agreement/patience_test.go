package agreement

import (
	"testing"
	"time"
)

func TestAWaitIsCountedFromTheLastProgress(t *testing.T) {
	p := Patience{Warning: 10 * time.Second, Shutdown: 30 * time.Second, Margin: 5 * time.Second}
	var w Wait
	for _, look := range []struct {
		at, warned time.Duration
		progress   uint64
		waited     time.Duration
		warn, end  bool
	}{
		{at: 100, warned: -1, progress: 1},
		{at: 114, warned: -1, progress: 1, waited: 14},
		{at: 115, warned: -1, progress: 1, waited: 15, warn: true},
		{at: 129, warned: 115, progress: 1, waited: 29},
		{at: 130, warned: 115, progress: 1, waited: 30, warn: true},
		{at: 134, warned: 130, progress: 2}, // it goes on
		{at: 168, warned: 160, progress: 2, waited: 34},
		{at: 169, warned: 160, progress: 2, waited: 35, end: true},
	} {
		warned := max(look.warned*time.Second, -1)
		waited, warn, end := w.Look(p, look.progress, warned, look.at*time.Second)
		if waited != look.waited*time.Second || warn != look.warn || end != look.end {
			t.Errorf("at %d s: waited %v, warn %v, end %v, want %+v", look.at, waited, warn, end, look)
		}
	}
	w = Wait{}
	for _, at := range []time.Duration{0, time.Hour} {
		if _, warn, end := w.Look(Patience{Margin: p.Margin}, 1, -1, at); warn || end {
			t.Errorf("after %v without limits: warn %v, end %v", at, warn, end)
		}
	}
}

func TestLooksComeTenTimesWithinTheShorterTime(t *testing.T) {
	for _, c := range []struct{ warning, shutdown, want time.Duration }{
		{0, 0, 0}, {time.Minute, 0, time.Second}, {0, 2 * time.Second, 200 * time.Millisecond},
		{time.Minute, 5 * time.Second, 500 * time.Millisecond}, {time.Millisecond, 0, 10 * time.Millisecond},
	} {
		if got := Every(c.warning, c.shutdown); got != c.want {
			t.Errorf("Every(%v, %v) = %v, want %v", c.warning, c.shutdown, got, c.want)
		}
	}
}
