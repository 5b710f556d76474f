package codec

// newInt8 rounds stochastically to 255 equidistant values, up to the greatest magnitude of the block.
func newInt8(a *Arguments) Codec { return integerOf(a, "int8", int8Levels) }

const int8Levels = 127

func integerOf(a *Arguments, name string, levels int) Codec {
	block, _ := a.block(512)
	return newInteger(name, levels, block, a.Feedback(false))
}

func newInteger(name string, levels, block int, residual bool) Codec {
	g := grid{kind: kindUniform, norm: normMax, levels: levels, block: block}
	return newBlockwise(name, g, residual, false, true, blockPart(block))
}
