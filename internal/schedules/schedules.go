// Package schedules runs the random schedules of a test, several at a time. Flags say how many, and which one alone.
package schedules

import (
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var (
	number = flag.Uint64("schedules", 0, "how many random schedules to run; 0 is the test's own number")
	only   = flag.Uint64("seed", 0, "seed of the one schedule to run, as a failure printed it; 0 is many schedules")
)

// Anew is a first seed that differs from run to run.
func Anew() uint64 { return uint64(time.Now().UnixNano()) }

// Alone reports whether one schedule alone is run, which may print what happens.
func Alone() bool { return *only != 0 }

// Run runs n schedules, those of the seeds from first on. One fails by an error that it returns or panics with; then the test
// ends, and prints how to repeat it.
func Run(t *testing.T, first, n uint64, schedule func(seed uint64) error) {
	t.Helper()
	if *number > 0 {
		n = *number
	}
	if Alone() {
		first, n = *only, 1
	}
	var begun atomic.Uint64
	var group sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		group.Go(func() {
			for k := begun.Add(1); k <= n && !t.Failed(); k = begun.Add(1) {
				seed := first + k - 1
				if err := try(schedule, seed); err != nil {
					t.Errorf("%v\nagain: go test -tags invariants -run %s -seed %d", err, t.Name(), seed)
				}
			}
		})
	}
	group.Wait()
}

// try runs one schedule. What it panics with is its error.
func try(schedule func(seed uint64) error, seed uint64) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v\n%s", r, debug.Stack())
		}
	}()
	return schedule(seed)
}
