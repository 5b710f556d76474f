package jobtest

import (
	"testing"
	"time"
)

// Eventually polls until a condition holds.
func Eventually(t testing.TB, failure string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(Hang)
	for !ok() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatal(failure)
		}
	}
}
