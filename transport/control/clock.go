package control

import (
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// clock compares the scheduler's clock with this host's, by the question whose answer took the shortest time (as NTP does).
type clock struct {
	at          string // the scheduler's address
	ahead, trip int64  // nanoseconds
	known       bool
}

// askClock asks for the scheduler's clock.
func askClock() *wire.Control { return &wire.Control{Clock: &wire.Clock{Sent: time.Now().UnixNano()}} }

// heard accounts for an answer. A trip counts for a percent more with each later one, since clocks drift.
func (c *clock) heard(a *wire.Clock, now int64) {
	trip := now - a.Sent
	if trip < 0 || a.Scheduler == 0 {
		return
	}
	c.trip += c.trip/100 + 1
	if !c.known || trip <= c.trip {
		c.known, c.trip, c.ahead = true, trip, a.Scheduler-(a.Sent+now)/2
	}
}

// Clock is how far the scheduler's clock is ahead of this host's, and how uncertain that is: half a round trip. known
// is false before the first answer. Each call asks once more, for later ones.
func (c *Client) Clock() (ahead, uncertain time.Duration, known bool) {
	c.push(askClock())
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(c.clock.ahead), time.Duration(c.clock.trip / 2), c.clock.known
}
