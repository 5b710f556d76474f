package codec

// none sends the elements as they are. A lossless stage without a codec uses it.
type none struct{}

func newNone(*Arguments) Codec { return none{} }

// None is the codec that changes nothing.
func None() Codec { return none{} }

func (none) String() string { return "none" }

func (none) MaxEncoded(n int) int { return 4 * n }

func (none) ResidualBytes(int) int { return 0 }

func (none) Unbiased() bool { return true }

func (c none) Answer() Codec { return c }

func (c none) Difference() Codec { return c }

func (none) Precise() bool { return true }

func (c none) Encode(dst, src, residual []byte, _ Stream) int {
	checkEncode(c, dst, src, residual)
	return copy(dst, src)
}

func (c none) Decode(dst, message []byte) error { return c.decode(dst, message, false) }

func (c none) DecodeAdd(acc, message []byte) error { return c.decode(acc, message, true) }

func (c none) decode(dst, message []byte, add bool) error {
	if n := elements(dst); len(message) != 4*n {
		return malformed(c, n, "it has %d bytes, not %d", len(message), 4*n)
	}
	if add {
		best.feed(dst, message)
	} else {
		copy(dst, message)
	}
	return nil
}
