package placement

import (
	"slices"
	"time"
)

// Exchange is that of one partition with its server, as a worker can time it by its own clock.
type Exchange struct {
	Bytes uint64
	Begun time.Duration // when the first byte of the push went to the server's connection
	Ended time.Duration // when the last byte of the answer was here
	Wait  time.Duration // in between, for other workers' pushes, as the server tells with its answer
}

// Meter measures for how long one server is busy with one worker in an iteration: the pair that a line of Pred(r, s) is fitted to
// (PSLD section 4.1), where s is all that the worker exchanges with the server. The zero value is empty.
//
// The time in which no partition is on its way does not count, nor does that in which all wait for other workers, and the time of
// several partitions on their way counts once. So a partition's wait behind others of its worker counts as theirs, and a server with few
// partitions is not fast because they wait for nobody. Where the wait lies in an exchange only the server knows; push and answer have the same bytes,
// so the rest is taken to be half before it and half behind.
type Meter struct {
	bytes float64
	busy  []span
}

type span struct{ from, to time.Duration }

// Add adds an exchange of the iteration.
func (m *Meter) Add(e Exchange) {
	half := max(0, e.Ended-e.Begun-e.Wait) / 2
	m.bytes += float64(e.Bytes)
	m.busy = append(m.busy, span{e.Begun, e.Begun + half}, span{e.Ended - half, e.Ended})
}

// End ends the iteration: it returns the bytes that were exchanged and the seconds in which the server was busy, and false
// if there were no exchanges. The meter is empty then.
func (m *Meter) End() (bytes, seconds float64, ok bool) {
	slices.SortFunc(m.busy, func(a, b span) int { return int(a.from - b.from) })
	var total, until time.Duration
	for i, s := range m.busy {
		if i == 0 {
			until = s.from
		}
		total += max(0, s.to-max(s.from, until))
		until = max(until, s.to)
	}
	bytes, ok = m.bytes, len(m.busy) > 0
	m.bytes, m.busy = 0, m.busy[:0]
	return bytes, total.Seconds(), ok
}
