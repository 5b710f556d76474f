// Package reference holds the searches that ElasticBSP's paper compares ZipLine with (section 5 of
// "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model"), to check
// barrier.Search by and to measure it against. Nothing but tests and benchmarks uses them.
//
// Each takes rows of ends in rising order, at least one row and none empty.
package reference

import (
	"cmp"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/paceline/paceline/core/barrier"
)

var nothing = barrier.Choice{At: math.MaxInt64, Wait: math.MaxInt64}

// better is the narrower of two choices, or of equally narrow ones the earlier.
func better(a, b barrier.Choice) barrier.Choice {
	if b.Wait < a.Wait || b.Wait == a.Wait && b.At < a.At {
		return b
	}
	return a
}

func window(first, last time.Duration) barrier.Choice {
	return barrier.Choice{At: last, Wait: last - first}
}

// Naive tries all R^n choices of one end from each row.
func Naive(ends [][]time.Duration) barrier.Choice {
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

// GridScan is algorithm 1: for each end of the row that begins first, the nearest end of every other
// row. It is a heuristic, in O(R²n).
func GridScan(ends [][]time.Duration) barrier.Choice {
	row := slices.MinFunc(ends, func(a, b []time.Duration) int { return int(a[0] - b[0]) })
	return gridScan(ends, row)
}

// FullGridScan is GridScan from each row in turn, in O(R²n²). The paper takes it for exhaustive, which
// it is not: an end that is nearest to the row's may be on the wrong side.
func FullGridScan(ends [][]time.Duration) barrier.Choice {
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

// element is an end with whose it is.
type element struct {
	at     time.Duration
	worker int
	index  int
}

func (e element) compare(o element) int {
	return cmp.Or(cmp.Compare(e.at, o.at), e.worker-o.worker, e.index-o.index)
}

// sorted is the paper's Ω: all ends in order, those of one time by worker.
func sorted(ends [][]time.Duration) []element {
	var omega []element
	for w, row := range ends {
		for i, at := range row {
			omega = append(omega, element{at, w, i})
		}
	}
	slices.SortFunc(omega, element.compare)
	return omega
}

// ZipLine is algorithm 2 as it is printed: the least of the newest ends of all workers is searched for
// each time. O(Rn²).
func ZipLine(ends [][]time.Duration) barrier.Choice {
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

// ZipLineOpt is section 5.3.1: the newest ends stay in order, so that the first is the least, and only
// a new end of the first's worker can make the window narrower. The worker's older end is searched from
// the front: O(Rn²) at worst.
func ZipLineOpt(ends [][]time.Duration) barrier.Choice {
	return zipLineOpt(ends, func(z []element, e element) int {
		return slices.IndexFunc(z, func(o element) bool { return o.worker == e.worker })
	})
}

// ZipLineOptBS is section 5.3.2: ZipLineOpt that finds the worker's older end by binary search for its
// time.
func ZipLineOptBS(ends [][]time.Duration) barrier.Choice {
	return zipLineOpt(ends, func(z []element, e element) int {
		if e.index == 0 {
			return -1
		}
		older := element{ends[e.worker][e.index-1], e.worker, e.index - 1}
		return sort.Search(len(z), func(i int) bool { return z[i].compare(older) >= 0 })
	})
}

func zipLineOpt(ends [][]time.Duration, find func(z []element, e element) int) barrier.Choice {
	z := make([]element, 0, len(ends)+1)
	best := nothing
	for _, e := range sorted(ends) {
		older := find(z, e)
		if older >= 0 {
			z = slices.Delete(z, older, older+1)
		}
		z = append(z, e)
		if len(z) == len(ends) && older <= 0 {
			best = better(best, window(z[0].at, e.at))
		}
	}
	return best
}
