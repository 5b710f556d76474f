package codec

// dgc is Deep Gradient Compression: top-k of sums of momentum. The residual is two tensors, the sum v of
// what was not sent and the momentum u:
//
//	u = m·u + gradient;  v = v + u;  the greatest of v are sent;  there v = u = 0
//
// This momentum replaces the optimizer's, which must have none. What is sent plus v
// equals the sum of all u, not of all gradients. The paper's clipping of gradients belongs before it.
type dgc struct {
	sparse
	share
	selector
	m float64
}

// newDGC takes a share or count=, momentum= and warmup=.
func newDGC(a *Arguments) Codec {
	s := a.share(0.001)
	m := a.Number("momentum", 0.9, "numbers from 0 to below 1", func(f float64) bool { return f >= 0 && f < 1 })
	c := &dgc{share: s, m: m}
	c.sparse = sparse{Setting("dgc", append(s.parts(), "momentum="+text(m))...), true}
	return c
}

// Answer is topk of the same share: the momentum is the worker's.
func (c *dgc) Answer() Codec { return topKOf(c.share, true) }

func (c *dgc) Difference() Codec { return c.Answer().Difference() }

// Momentum implements [Momentum].
func (c *dgc) Momentum() float64 { return c.m }

func (c *dgc) MaxEncoded(n int) int { return maxSparse(n, c.most(n)) }

func (c *dgc) ResidualBytes(n int) int { return 8 * n }

func (c *dgc) Encode(dst, src, residual []byte, s Stream) int {
	n := checkEncode(c, dst, src, residual)
	if n == 0 {
		return writeSparse(dst, nil, nil, true)
	}
	v, u := residual[:4*n], residual[4*n:]
	best.momentum(v, u, src, float32(c.m))
	chosen := c.top(v, nil, c.at(n, s.Iteration))
	defer c.pool.Put(chosen)
	forget(chosen.numbers(), v, u)
	size := writeSparse(dst, v, chosen.numbers(), true)
	if dst[0] == formDense {
		clear(u)
	}
	moving := of[float32](u)
	for _, i := range chosen.numbers() {
		moving[i] = 0
	}
	return size
}
