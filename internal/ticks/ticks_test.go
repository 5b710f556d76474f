package ticks_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/ticks"
)

func TestUntilItIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done, calls := make(chan struct{}), 0
		ticks.Until(done, 0, func(time.Time) { t.Error("called where the interval is 0") })
		start := time.Now()
		ticks.Until(done, time.Minute, func(now time.Time) {
			if calls++; now.Sub(start) != time.Duration(calls)*time.Minute {
				t.Errorf("call %d comes after %v", calls, now.Sub(start))
			}
			if calls == 3 {
				close(done)
			}
		})
		if calls != 3 {
			t.Errorf("%d calls, want 3", calls)
		}
	})
}
