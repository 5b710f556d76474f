// Package half converts between float32 and the 16-bit floating-point types, in plain Go. It defines
// the results of the kernels of core/reduce and core/codec.
package half

import "math"

// FromBFloat16 is exact: a bfloat16 is the upper half of a float32.
func FromBFloat16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

// ToBFloat16 rounds to the nearest, ties to even. A NaN stays one.
func ToBFloat16(f float32) uint16 {
	u := math.Float32bits(f)
	if f != f {
		return uint16(u>>16) | 0x40
	}
	return uint16((u + 0x7fff + u>>16&1) >> 16)
}

// FromFloat16 is exact. A NaN comes out quiet.
func FromFloat16(h uint16) float32 {
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

// ToFloat16 rounds to the nearest, ties to even. A NaN stays one; an overflow becomes infinite.
func ToFloat16(f float32) uint16 {
	u := math.Float32bits(f)
	sign := uint16(u >> 16 & 0x8000)
	u &= 0x7fffffff
	switch {
	case u > 0x7f800000:
		return sign | 0x7e00 | uint16(u>>13&0x3ff)
	case u >= 0x47800000: // 2^16; values that round up to it become infinite below
		return sign | 0x7c00
	case u >= 0x38800000: // 2^-14, the smallest normal number
		return sign | uint16((u-0x38000000+0xfff+u>>13&1)>>13)
	default:
		// Near 0.5 a float32 counts in units of 2^-24, as float16 does here: the sum rounds.
		return sign | uint16(math.Float32bits(math.Float32frombits(u)+0.5)-0x3f000000)
	}
}
