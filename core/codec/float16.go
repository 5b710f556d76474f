package codec

// newFloat16 rounds to IEEE 754 half precision, to the nearest with ties to even. Values beyond ±65504
// become infinite.
func newFloat16(a *Arguments) Codec {
	return newBlockwise("fp16", grid{kind: kindFloat16, block: halfBlock}, a.Feedback(false), false, false)
}
