package codec

// newBFloat16 rounds to the upper half of a float32, to the nearest with ties to even.
func newBFloat16(a *arguments) Codec {
	return newBlockwise("bf16", grid{kind: kindBFloat16, block: halfBlock}, a.feedback(false), false, false)
}
