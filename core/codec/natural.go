package codec

// newNatural rounds stochastically to one of the powers of two around an element: natural dithering.
// The grid begins at the block's greatest magnitude, rounded up to a power of two, and halves
// levels-1 times; a smaller element becomes the last value or 0. All arithmetic is exact.
func newNatural(a *Arguments) Codec {
	levels, levelsPart := a.levels(7, maxNatural)
	block, blockPart := a.block(512)
	g := grid{kind: kindNatural, norm: normMax, levels: levels, block: block}
	return newBlockwise("natural", g, a.Feedback(false), false, true, levelsPart, blockPart)
}
