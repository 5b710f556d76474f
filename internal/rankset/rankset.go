// Package rankset has sets of ranks: contributors, live ranks, missing ranks.
package rankset

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/paceline/paceline/internal/each"
)

// Set is a set of ranks. The zero value is empty and ready to use. Copies share
// memory: Clone a set before a change that its other users must not see.
type Set struct{ words []uint64 }

// Of makes a set of the given ranks.
func Of(ranks ...int) Set {
	var s Set
	for _, r := range ranks {
		s.Add(r)
	}
	return s
}

// Range makes the set {0, …, n-1}.
func Range(n int) Set {
	var s Set
	for r := range n {
		s.Add(r)
	}
	return s
}

// Add adds rank r, and reports whether it was new.
func (s *Set) Add(r int) bool {
	w, b := r>>6, uint64(1)<<(r&63)
	for len(s.words) <= w {
		s.words = append(s.words, 0)
	}
	if s.words[w]&b != 0 {
		return false
	}
	s.words[w] |= b
	return true
}

// Remove removes rank r, and reports whether it was in the set.
func (s *Set) Remove(r int) bool {
	if !s.Has(r) {
		return false
	}
	s.words[r>>6] &^= 1 << (r & 63)
	return true
}

// Has reports whether rank r is in the set.
func (s Set) Has(r int) bool {
	return r >= 0 && r>>6 < len(s.words) && s.words[r>>6]&(1<<(r&63)) != 0
}

// Len is the number of ranks in the set.
func (s Set) Len() int {
	n := 0
	for _, w := range s.words {
		n += bits.OnesCount64(w)
	}
	return n
}

// Covers reports whether every rank of other is in s.
func (s Set) Covers(other Set) bool { return other.Without(s) == 0 }

// Minus is the set of ranks in s that are not in other.
func (s Set) Minus(other Set) Set {
	d := s.Clone()
	d.Subtract(other)
	return d
}

// Without is how many ranks of s are in none of the others.
func (s Set) Without(others ...Set) int {
	n := 0
	for i, w := range s.words {
		for _, other := range others {
			if i < len(other.words) {
				w &^= other.words[i]
			}
		}
		n += bits.OnesCount64(w)
	}
	return n
}

// Subtract removes the ranks of other.
func (s *Set) Subtract(other Set) {
	for i := range s.words {
		if i < len(other.words) {
			s.words[i] &^= other.words[i]
		}
	}
}

// Copy makes s equal to other, in its own memory.
func (s *Set) Copy(other Set) { s.words = append(s.words[:0], other.words...) }

// Clone is a copy that shares no memory with s.
func (s Set) Clone() Set { return Set{append([]uint64(nil), s.words...)} }

// Reset empties the set and keeps its memory.
func (s *Set) Reset() { clear(s.words) }

// Ranks lists the ranks in rising order.
func (s Set) Ranks() []int {
	ranks := make([]int, 0, s.Len())
	for i, w := range s.words {
		for ; w != 0; w &= w - 1 {
			ranks = append(ranks, i<<6+bits.TrailingZeros64(w))
		}
	}
	return ranks
}

// Overlap is the set of ranks in both s and other.
func (s Set) Overlap(other Set) Set {
	if s.Len() == 0 || other.Len() == 0 {
		return Set{}
	}
	return s.Minus(s.Minus(other))
}

// Named is the set in a sentence: "rank 3", "ranks 0, 2".
func (s Set) Named() string {
	ranks := s.Ranks()
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	return strings.TrimSpace("ranks " + Join(ranks))
}

func (s Set) String() string { return "[" + Join(s.Ranks()) + "]" }

// Join writes ranks as people read them: "0, 2, 5".
func Join(ranks []int) string { return strings.Join(each.Of(ranks, strconv.Itoa), ", ") }
