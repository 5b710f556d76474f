// Package reference holds the fastest search of ElasticBSP's paper (section 5 of "ZipLine: an optimized algorithm for the
// elastic bulk synchronous parallel model") and the paper's inputs, to check barrier.Search by and to measure it against.
// Nothing but tests and benchmarks uses it; its tests have the paper's other searches.
//
// A search takes rows of ends in rising order, at least one row and none empty.
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

// ZipLineOptBS is section 5.3.2: zipLineOpt that finds the worker's older end by binary search for its
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

// zipLineOpt is section 5.3.1: the newest ends stay in order, so that the first is the least, and only a new end of the
// first's worker can make the window narrower. find finds the worker's older end.
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
