// Package ticks repeats something at intervals.
package ticks

import "time"

// Until calls f every so often, until done is closed; never where every is 0.
func Until(done <-chan struct{}, every time.Duration, f func(now time.Time)) {
	if every == 0 {
		return
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			f(now)
		case <-done:
			return
		}
	}
}
