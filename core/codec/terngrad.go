package codec

// newTernGrad rounds stochastically to -s, 0 or s, where s is the greatest magnitude of the block after
// it was clipped to some standard deviations: TernGrad. They are deviations from 0, which the paper takes for
// the mean: deviations of elements that are alike are nearly nothing, and so would be what is left of them.
// Clipping is a bias, unclipped outliers are noise: clip=0 turns clipping off.
func newTernGrad(a *Arguments) Codec {
	clip := a.Number("clip", 2.5, "numbers from 1 to 100, and 0 for none", func(f float64) bool { return f == 0 || f >= 1 && f <= 100 })
	block, part := a.block(4096)
	g := grid{kind: kindUniform, norm: normClipped, levels: 1, block: block, clip: clip}
	if clip == 0 {
		g.norm = normMax
	}
	return newBlockwise("terngrad", g, a.Feedback(false), false, clip == 0, "clip="+text(clip), part)
}
