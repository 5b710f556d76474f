package control

import (
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// clock compares the scheduler's clock with this host's, by the beat whose answer took the shortest time (as NTP does).
type clock struct {
	ahead, trip int64 // nanoseconds
	known       bool
}

// heard takes in the answer to a beat. A trip counts for a percent more with each later one, since clocks drift.
func (c *clock) heard(b *wire.Beat, now int64) {
	trip := now - b.Sent
	if trip < 0 || b.Clock == 0 {
		return
	}
	c.trip += c.trip/100 + 1
	if !c.known || trip <= c.trip {
		c.known, c.trip, c.ahead = true, trip, b.Clock-(b.Sent+now)/2
	}
}

// Clock is how far the scheduler's clock is ahead of this host's, and how uncertain that is: half a round trip. known
// is false before the answer to the first beat.
func (c *Client) Clock() (ahead, uncertain time.Duration, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Duration(c.clock.ahead), time.Duration(c.clock.trip / 2), c.clock.known
}
