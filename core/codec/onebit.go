package codec

// newOneBit sends the sign of each element and the mean magnitude of the block: 1-bit SGD, which
// converges only with its residual. Of all messages with one magnitude per block this is the nearest.
func newOneBit(a *Arguments) Codec {
	block, part := a.block(1024)
	g := grid{kind: kindSign, norm: normMean, levels: 1, block: block}
	return newBlockwise("onebit", g, a.Feedback(true), true, false, part)
}
