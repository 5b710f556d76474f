package codec

// newQSGD rounds stochastically to multiples of the block's Euclidean norm over the number of levels:
// QSGD, with blocks as buckets. Codes have a fixed width, or Elias' gamma code where that is
// shorter: most elements are far below the norm.
func newQSGD(a *Arguments) Codec {
	levels, levelsPart := a.levels(7, maxLevels)
	block, blockPart := a.block(256)
	g := grid{kind: kindUniform, norm: normL2, levels: levels, block: block}
	coding := ""
	if g.elias = a.Choice("coding", "packed", "elias") == "elias"; g.elias {
		coding = "coding=elias"
	}
	return newBlockwise("qsgd", g, a.Feedback(false), false, true, levelsPart, blockPart, coding)
}
