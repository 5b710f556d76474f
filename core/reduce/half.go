package reduce

import "math"

func widen(dst []float32, src []uint16, convert func(uint16) float32) {
	for i, h := range src {
		dst[i] = convert(h)
	}
}

func narrow(dst []uint16, src []float32, convert func(float32) uint16) {
	for i, f := range src {
		dst[i] = convert(f)
	}
}

// bfloatToFloat is exact: a bfloat16 is the upper half of a float32.
func bfloatToFloat(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// floatToBfloat rounds to the nearest, ties to even. A NaN stays one.
func floatToBfloat(f float32) uint16 {
	u := math.Float32bits(f)
	if f != f {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

// halfToFloat is exact. A NaN comes out quiet.
func halfToFloat(h uint16) float32 {
	sign, exponent, mantissa := uint32(h&0x8000)<<16, uint32(h>>10&31), uint32(h&0x3ff)
	switch {
	case exponent == 31 && mantissa != 0:
		return math.Float32frombits(sign | 0x7fc00000 | mantissa<<13)
	case exponent == 31:
		return math.Float32frombits(sign | 0x7f800000)
	case exponent != 0:
		return math.Float32frombits(sign | (exponent+112)<<23 | mantissa<<13)
	default: // zero and subnormal numbers: multiples of 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(mantissa)*0x1p-24))
	}
}

// floatToHalf rounds to the nearest, ties to even. A NaN stays one; what is too great becomes infinite.
func floatToHalf(f float32) uint16 {
	u := math.Float32bits(f)
	sign := uint16(u >> 16 & 0x8000)
	u &= 0x7fffffff
	switch {
	case u > 0x7f800000:
		return sign | 0x7e00 | uint16(u>>13&0x3ff)
	case u >= 0x47800000: // 2^16; what rounds up to it comes out as infinity below
		return sign | 0x7c00
	case u >= 0x38800000: // 2^-14, the smallest normal number
		return sign | uint16((u-0x38000000+0xfff+u>>13&1)>>13)
	default:
		// Near 0.5 a float32 counts in units of 2^-24, as float16 does here: the sum rounds.
		return sign | uint16(math.Float32bits(math.Float32frombits(u)+0.5)-0x3f000000)
	}
}
