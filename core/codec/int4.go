package codec

// newInt4 is newInt8 with 15 values.
func newInt4(a *arguments) Codec { return newInteger(a, "int4", 7) }
