package agreement

import "time"

// Patience is how long a rank waits for what it has asked of servers, by its own clock. It bounds the wait also where the
// home looks for no stalls, or does not answer though it runs.
type Patience struct {
	Warning  time.Duration // warn of an operation without progress for this long; 0 for never
	Shutdown time.Duration // end it after this long; 0 for never
	Margin   time.Duration // on top of both: the home, which knows the ranks that are missing, comes first
}

// Every is how often to look for operations that wait too long: ten times within the shorter time, at least once a second.
// 0 is never.
func Every(warning, shutdown time.Duration) time.Duration {
	shortest := warning
	if shortest == 0 || shutdown > 0 && shutdown < shortest {
		shortest = shutdown
	}
	if shortest <= 0 {
		return 0
	}
	return min(max(shortest/10, 10*time.Millisecond), time.Second)
}

// Wait is an operation that a rank waits for. The zero value begins at its first Look.
type Wait struct {
	began    bool
	progress uint64
	since    time.Duration // without progress
}

// Look says what is due for an operation. progress is any number that differs when it has come further; warned is when
// anybody last warned of it, negative for never.
func (w *Wait) Look(p Patience, progress uint64, warned, now time.Duration) (waited time.Duration, warn, end bool) {
	if !w.began || progress != w.progress {
		*w = Wait{began: true, progress: progress, since: now}
	}
	waited = now - w.since
	end = over(waited-p.Margin, p.Shutdown)
	return waited, !end && over(now-max(w.since, warned)-p.Margin, p.Warning), end
}
