package codec

import (
	"math"
	"slices"
	"sync"
)

// candidates are elements that may be among the greatest: their indices, rising, and the bits of their
// magnitudes, which have the order of the magnitudes.
type candidates struct {
	index, key []uint32 // both of the length of the room
	n          int      // of them in use
}

// reserve empties the candidates and makes room for as many.
func (c *candidates) reserve(room int) {
	c.n = 0
	if len(c.index) < room {
		c.index, c.key = make([]uint32, room), make([]uint32, room)
	}
}

// keep keeps the k greatest, of equal ones the first. It returns the k-th greatest magnitude, 0 where there
// are at most k.
func (c *candidates) keep(k int) uint32 {
	if c.n <= k {
		return 0
	}
	least, equal := greatest(c.key[:c.n], k)
	kept := 0
	for i, u := range c.key[:c.n] {
		if u == least {
			equal--
		}
		if u > least || u == least && equal >= 0 {
			c.index[kept], c.key[kept] = c.index[i], u
			kept++
		}
	}
	c.n = kept
	return least
}

// greatest finds the k-th greatest of some magnitudes, and how many that are equal to it belong to the
// first k. It sorts them by 11, 10 and 10 bits into bins; each pass examines one.
func greatest(magnitudes []uint32, k int) (value uint32, equal int) {
	prefix := uint32(0)
	for _, digit := range [...]struct{ shift, bits uint32 }{{20, 11}, {10, 10}, {0, 10}} {
		var bins [1 << 11]int
		for _, u := range magnitudes {
			if uint64(u)>>(digit.shift+digit.bits) == uint64(prefix) {
				bins[u>>digit.shift&(1<<digit.bits-1)]++
			}
		}
		bin := uint32(1<<digit.bits - 1)
		for ; bins[bin] < k; bin-- {
			k -= bins[bin]
		}
		prefix = prefix<<digit.bits | bin
	}
	return prefix, k
}

// selector finds the greatest elements of tensors. It reuses its memory.
type selector struct{ pool sync.Pool }

func (s *selector) get() *candidates {
	if c, ok := s.pool.Get().(*candidates); ok {
		return c
	}
	return new(candidates)
}

// top adds src to x where there is a src, and returns the k elements of x with the greatest magnitudes,
// exactly: of equal ones the first; zeros never. NaN counts as the greatest, then infinity. The caller
// returns the candidates to the pool.
//
// A candidate is what exceeds a threshold. When there is no more room for candidates, the k greatest stay and
// the least of them is the new threshold, so the result is exact for any first threshold. The
// first one comes from a sample, such that a little more than k exceed it, and the room is for twice k: most
// tensors need one pass. Where fewer than k exceed it, the search starts again without a threshold.
func (s *selector) top(x, src []byte, k int) *candidates {
	c := s.get()
	n := len(x) / 4
	first := sample(c, x, src, k)
	c.reserve(min(2*k+4096, n+64))
	for {
		threshold := first
		for from := 0; from < n; {
			from = best.scan(x, src, from, threshold, c)
			if from < n {
				threshold = max(threshold, c.keep(k))
			}
		}
		if c.n >= k || first == 0 {
			c.keep(k)
			return c
		}
		first, src, c.n = 0, nil, 0 // src has been added already
	}
}

// sampled is the size of a sample, and the size in samples of the smallest tensor that is sampled.
const (
	sampled    = 1 << 14
	worthwhile = 4
)

// sample estimates a magnitude that slightly more than k elements of x plus src exceed, or returns 0.
func sample(c *candidates, x, src []byte, k int) uint32 {
	v, g := of[float32](x), of[float32](src)
	n := len(v)
	expected := float64(sampled) * float64(k) / float64(n)
	rank := int(expected + 4*math.Sqrt(expected) + 8) // four standard deviations: too few exceed it once in 30,000 times
	if n < worthwhile*sampled || rank > sampled/2 {
		return 0
	}
	c.reserve(sampled)
	strata, places := uint64(n)<<32/sampled, keys{}
	for i := range c.key[:sampled] {
		at := (uint64(i)*strata + strata>>32*uint64(places.draw(uint32(i)))) >> 32
		f := v[at]
		if src != nil {
			f += g[at]
		}
		c.key[i] = math.Float32bits(f) & magnitude
	}
	value, _ := greatest(c.key[:sampled], rank)
	return value
}

// numbers are the candidates' elements.
func (c *candidates) numbers() []uint32 { return c.index[:c.n] }

// grow makes room for more candidates behind the present ones.
func (c *candidates) grow(room int) {
	c.index = slices.Grow(c.index, room)[:len(c.index)+room]
	c.key = slices.Grow(c.key, room)[:len(c.key)+room]
}
