package placement

import (
	"testing"
	"time"
)

// PSLD section 4.1, with the wait for other workers taken out and the time of exchanges beside each other counted once.
func TestAMeterCountsTheTimeInWhichAServerIsBusy(t *testing.T) {
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		exchanges []Exchange
		want      float64 // ms
	}{
		"one":                              {[]Exchange{{5, 10 * ms, 30 * ms, 0}}, 20},
		"one that waits":                   {[]Exchange{{5, 10 * ms, 130 * ms, 100 * ms}}, 20},
		"two with a pause":                 {[]Exchange{{5, 0, 20 * ms, 0}, {5, 50 * ms, 60 * ms, 0}}, 30},
		"two beside each other":            {[]Exchange{{5, 0, 20 * ms, 0}, {5, 10 * ms, 40 * ms, 0}}, 40},
		"the second answered first":        {[]Exchange{{5, 10 * ms, 20 * ms, 0}, {5, 0, 40 * ms, 0}}, 40},
		"both wait at the same time":       {[]Exchange{{5, 0, 140 * ms, 100 * ms}, {5, 10 * ms, 150 * ms, 100 * ms}}, 60},
		"one waits while the other is out": {[]Exchange{{5, 0, 100 * ms, 80 * ms}, {5, 20 * ms, 80 * ms, 0}}, 80},
		"a wait longer than the exchange":  {[]Exchange{{5, 0, 10 * ms, 20 * ms}}, 0},
	} {
		var m Meter
		var bytes float64
		for _, e := range c.exchanges {
			m.Add(e)
			bytes += float64(e.Bytes)
		}
		if b, seconds, ok := m.End(); !ok || b != bytes || !near(1000*seconds, c.want) {
			t.Errorf("%s: %v bytes in %v s, want %v in %v ms", name, b, seconds, bytes, c.want)
		}
		if _, _, ok := m.End(); ok {
			t.Errorf("%s: the meter is not empty at its end", name)
		}
	}
}
