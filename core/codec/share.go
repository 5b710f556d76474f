package codec

import (
	"fmt"
	"math"
)

// share is the part of a tensor that a sparse codec sends.
type share struct {
	part   float64 // of the elements; 0: count applies
	count  int
	warmUp int // iterations in which the part falls from warmUpFrom
}

// warmUpFrom is the part that is sent in the first iteration of a warm-up, as in Deep Gradient
// Compression: 25 %.
const warmUpFrom = 0.25

// share takes a part ("0.01") or a count ("count=100"), and "warmup=iterations".
func (a *Arguments) share(otherwise float64) share {
	_, hasPart := a.given[""]
	s := share{
		part:   a.Number("", otherwise, "shares over 0 and up to 1", func(f float64) bool { return f > 0 && f <= 1 }),
		count:  a.Integer("count", 0, 1, MaxElements),
		warmUp: a.Integer("warmup", 0, 0, 1<<30),
	}
	switch {
	case s.count > 0 && hasPart:
		a.Fail("a share and count=%d exclude each other", s.count)
	case s.count > 0 && s.warmUp > 0:
		a.Fail("warmup needs a share, not a count")
	case s.count > 0:
		s.part = 0
	}
	return s
}

func (s share) parts() []string {
	if s.count > 0 {
		return []string{fmt.Sprintf("count=%d", s.count)}
	}
	if s.warmUp > 0 {
		return []string{text(s.part), fmt.Sprintf("warmup=%d", s.warmUp)}
	}
	return []string{text(s.part)}
}

// at is the number of the n elements that iteration i sends: one or more, unless n is 0. A warm-up falls
// exponentially.
func (s share) at(n int, i uint64) int {
	part := s.part
	if i < uint64(s.warmUp) && part < warmUpFrom {
		part = warmUpFrom * math.Pow(part/warmUpFrom, float64(i)/float64(s.warmUp))
	}
	return s.of(n, part)
}

// most is the greatest number of the n elements that any iteration sends.
func (s share) most(n int) int {
	if s.warmUp > 0 {
		return s.of(n, max(s.part, warmUpFrom))
	}
	return s.of(n, s.part)
}

func (s share) of(n int, part float64) int {
	if s.count > 0 {
		return min(s.count, n)
	}
	return min(int(math.Ceil(part*float64(n))), n)
}
