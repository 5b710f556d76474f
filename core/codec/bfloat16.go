package codec

// newBFloat16 rounds to the upper half of a float32, to the nearest with ties to even.
func newBFloat16(a *Arguments) Codec {
	return newBlockwise("bf16", grid{kind: kindBFloat16, block: halfBlock}, a.Feedback(false), false, false)
}
