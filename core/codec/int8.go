package codec

// newInt8 rounds stochastically to 255 equidistant values, up to the greatest magnitude of the block.
func newInt8(a *arguments) Codec { return newInteger(a, "int8", 127) }

func newInteger(a *arguments, name string, levels int) Codec {
	block, part := a.block(512)
	g := grid{kind: kindUniform, norm: normMax, levels: levels, block: block}
	return newBlockwise(name, g, a.feedback(false), false, true, part)
}
