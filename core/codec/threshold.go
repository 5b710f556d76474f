package codec

import "math"

// threshold sends the elements whose magnitude is the threshold or more.
type threshold struct {
	sparse
	selector
	at    float64
	below uint32 // the greatest bits of a magnitude that is not sent
}

// newThreshold takes the threshold and feedback=.
func newThreshold(a *Arguments) Codec {
	if _, has := a.given[""]; !has {
		a.Fail("the threshold is missing, as in threshold:0.001")
	}
	t := a.Number("", 1, "numbers over 0 that float32 holds", func(f float64) bool { return float32(f) > 0 && float32(f) <= math.MaxFloat32 })
	return thresholdOf(t, a.Feedback(true))
}

func thresholdOf(t float64, residual bool) Codec {
	c := &threshold{at: t, below: math.Float32bits(float32(t)) - 1}
	c.sparse = sparse{Setting("threshold", text(t), FeedbackPart(residual, true)), feedback(residual)}
	return c
}

func (c *threshold) Answer() Codec { return c }

func (c *threshold) Difference() Codec { return thresholdOf(c.at, false) }

func (c *threshold) MaxEncoded(n int) int { return maxSparse(n, n) }

func (c *threshold) Encode(dst, src, residual []byte, _ Stream) int {
	n := checkEncode(c, dst, src, residual)
	x, add := c.sumIn(src, residual)
	found := c.get()
	defer c.pool.Put(found)
	found.reserve(min(n/64+4096, n))
	for from := 0; from < n; {
		if from = best.scan(x, add, from, c.below, found); from < n {
			found.grow(min(len(found.index), n-found.n) + 64)
		}
	}
	return writeSparse(dst, x, found.numbers(), c.feedback)
}
