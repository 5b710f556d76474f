package sim

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Bandwidth is in bits per second; 0 is without limit.
type Bandwidth float64

var bandwidthUnits = []struct {
	name string
	size float64
}{{"Tbit", 1e12}, {"Gbit", 1e9}, {"Mbit", 1e6}, {"Kbit", 1e3}}

// ParseBandwidth reads "10Gbit", "800Mbit" or "unlimited".
func ParseBandwidth(text string) (Bandwidth, error) {
	if text == "unlimited" {
		return 0, nil
	}
	for _, u := range bandwidthUnits {
		number, ok := strings.CutSuffix(text, u.name)
		if !ok {
			continue
		}
		if v, err := strconv.ParseFloat(number, 64); err == nil && v*u.size >= 1 && v*u.size <= 1e15 {
			return Bandwidth(v * u.size), nil
		}
	}
	return 0, fmt.Errorf("bandwidth is %q, allowed is a number above 0 with Kbit, Mbit, Gbit or Tbit, each per second, or unlimited", text)
}

// hold is how long a message occupies a link of this bandwidth.
func (b Bandwidth) hold(bytes int64) time.Duration {
	if b == 0 {
		return 0
	}
	return time.Duration(min(math.Round(float64(bytes)*8e9/float64(b)), float64(forever)))
}

// link is one direction of a link: the time from which it is free.
type link struct{ free time.Duration }

// occupy holds the link for a message that arrives now, after the earlier ones, and returns the time of its
// end.
func (l *link) occupy(now, hold time.Duration) time.Duration {
	l.free = min(max(l.free, now)+hold, forever)
	return l.free
}
