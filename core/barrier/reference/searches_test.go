package reference

import (
	"math"
	"slices"
	"time"

	"github.com/paceline/paceline/core/barrier"
)

// The paper's other searches, each a plain reference for the next.

// naiveSearch tries all R^n choices of one end from each row.
func naiveSearch(ends [][]time.Duration) barrier.Choice {
	return naive(ends, math.MaxInt64, math.MinInt64)
}

func naive(rows [][]time.Duration, first, last time.Duration) barrier.Choice {
	if len(rows) == 0 {
		return window(first, last)
	}
	best := nothing
	for _, end := range rows[0] {
		best = better(best, naive(rows[1:], min(first, end), max(last, end)))
	}
	return best
}

// gridScanFirst is algorithm 1: for each end of the row that begins first, the nearest end of every other
// row. It is a heuristic, in O(R²n).
func gridScanFirst(ends [][]time.Duration) barrier.Choice {
	row := slices.MinFunc(ends, func(a, b []time.Duration) int { return int(a[0] - b[0]) })
	return gridScan(ends, row)
}

// gridScanAll is gridScan from each row in turn, in O(R²n²). The paper takes it for exhaustive, which
// it is not: an end that is nearest to the row's may be on the wrong side.
func gridScanAll(ends [][]time.Duration) barrier.Choice {
	best := nothing
	for _, row := range ends {
		best = better(best, gridScan(ends, row))
	}
	return best
}

func gridScan(ends [][]time.Duration, row []time.Duration) barrier.Choice {
	best := nothing
	for _, end := range row {
		first, last := end, end
		for _, other := range ends {
			near := other[0]
			if &other[0] == &row[0] {
				continue
			}
			for _, e := range other {
				if (e - end).Abs() < (near - end).Abs() {
					near = e
				}
			}
			first, last = min(first, near), max(last, near)
		}
		best = better(best, window(first, last))
	}
	return best
}

// zipLine is algorithm 2 as it is printed: the least of the newest ends of all workers is searched for
// each time. O(Rn²).
func zipLine(ends [][]time.Duration) barrier.Choice {
	z := map[int]time.Duration{}
	best := nothing
	for _, e := range sorted(ends) {
		z[e.worker] = e.at
		if len(z) < len(ends) {
			continue
		}
		first := e.at
		for _, at := range z {
			first = min(first, at)
		}
		best = better(best, window(first, e.at))
	}
	return best
}

// zipLineOptScan is section 5.3.1: the worker's older end is searched from the front, O(Rn²) at worst.
func zipLineOptScan(ends [][]time.Duration) barrier.Choice {
	return zipLineOpt(ends, func(z []element, e element) int {
		return slices.IndexFunc(z, func(o element) bool { return o.worker == e.worker })
	})
}
