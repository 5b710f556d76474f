package codec

// newNatural rounds stochastically to one of the powers of two around an element: natural dithering.
// The grid begins at the power of two from the greatest magnitude of the block upwards and halves
// levels-1 times; below, an element goes to the last value or to 0. All of it is exact.
func newNatural(a *Arguments) Codec {
	levels, levelsPart := a.levels(7, maxNatural)
	block, blockPart := a.block(512)
	g := grid{kind: kindNatural, norm: normMax, levels: levels, block: block}
	return newBlockwise("natural", g, a.Feedback(false), false, true, levelsPart, blockPart)
}
