package codec

// newOneBit sends the sign of each element and the mean magnitude of the block: 1-bit SGD, which
// converges by its residual only. The message of a block is the best that has one magnitude.
func newOneBit(a *Arguments) Codec {
	block, part := a.block(1024)
	g := grid{kind: kindSign, norm: normMean, levels: 1, block: block}
	return newBlockwise("onebit", g, a.Feedback(true), true, false, part)
}
