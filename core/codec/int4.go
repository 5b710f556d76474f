package codec

// newInt4 is newInt8 with 15 values.
func newInt4(a *Arguments) Codec { return integerOf(a, "int4", int4Levels) }

const int4Levels = 7
