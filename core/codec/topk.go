package codec

// topK sends the elements with the greatest magnitudes: exactly as many as the share says, of equal ones
// the first, but never zeros. Where the list would not be shorter than the tensor, it sends all.
type topK struct {
	sparse
	share
	selector
}

// newTopK takes a share or count=, warmup= and feedback=.
func newTopK(a *Arguments) Codec {
	return topKOf(a.share(0.01), a.Feedback(true))
}

func topKOf(s share, residual bool) Codec {
	c := &topK{share: s}
	c.sparse = sparse{Setting("topk", append(s.parts(), FeedbackPart(residual, true))...), feedback(residual)}
	return c
}

func (c *topK) Answer() Codec { return c }

func (c *topK) Difference() Codec { return topKOf(c.share, false) }

func (c *topK) MaxEncoded(n int) int { return maxSparse(n, c.most(n)) }

func (c *topK) Encode(dst, src, residual []byte, s Stream) int {
	n := checkEncode(c, dst, src, residual)
	x, add := c.sumIn(src, residual)
	chosen := c.top(x, add, c.at(n, s.Iteration))
	defer c.pool.Put(chosen)
	if c.feedback {
		forget(chosen.numbers(), x)
	}
	return writeSparse(dst, x, chosen.numbers(), c.feedback)
}
