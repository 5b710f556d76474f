package half

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
)

// Every float16 and bfloat16 is compared with its definition, and rounding with exact arithmetic.
func TestConversionsAreExactAndRoundToNearestEven(t *testing.T) {
	for _, f := range []struct {
		name     string
		widen    func(uint16) float32
		narrow   func(float32) uint16
		mantissa int // bits
		least    int // exponent of the smallest normal number
	}{
		{"float16", FromFloat16, ToFloat16, 10, -14},
		{"bfloat16", FromBFloat16, ToBFloat16, 7, -126},
	} {
		t.Run(f.name, func(t *testing.T) {
			top := 1<<(15-f.mantissa) - 1
			for h := range 1 << 16 {
				got := f.widen(uint16(h))
				exponent, mantissa := h>>f.mantissa&top, h&(1<<f.mantissa-1)
				want := math.Ldexp(float64(1<<f.mantissa+mantissa), f.least+exponent-1-f.mantissa)
				switch {
				case exponent == top && mantissa != 0:
					if got == got || f.widen(f.narrow(got)) == f.widen(f.narrow(got)) {
						t.Fatalf("%#04x: %v, want NaN", h, got)
					}
					continue
				case exponent == top:
					want = math.Inf(1)
				case exponent == 0:
					want = math.Ldexp(float64(mantissa), f.least-f.mantissa)
				}
				if h>>15 == 1 {
					want = -want
				}
				if float64(got) != want || math.Signbit(float64(got)) != (h>>15 == 1) || f.narrow(got) != uint16(h) {
					t.Fatalf("%#04x: widened to %v, want %v; narrowed again %#04x", h, got, want, f.narrow(got))
				}
			}
			rng := rand.New(rand.NewPCG(11, 12))
			for range 200_000 {
				h := uint16(rng.IntN(top << f.mantissa)) // positive and finite
				low, high := f.widen(h), f.widen(h+1)
				if math.IsInf(float64(high), 1) {
					high = float32(math.Ldexp(1, f.least+top-1))
				}
				checkRounding(t, f.narrow, low+(high-low)*float32(rng.IntN(9))/8, low, high, h)
				checkRounding(t, f.narrow, low+(high-low)*rng.Float32(), low, high, h)
			}
		})
	}
}

// checkRounding wants x, between the neighbours low (which is h) and high, to go to the nearer one.
func checkRounding(t *testing.T, narrow func(float32) uint16, x, low, high float32, h uint16) {
	t.Helper()
	exact := func(f float32) *big.Float { return new(big.Float).SetPrec(400).SetFloat64(float64(f)) }
	if math.IsInf(float64(high), 1) || math.IsInf(float64(x), 1) {
		return // above the greatest bfloat16 no float32 remains to round to
	}
	down, up := new(big.Float).Sub(exact(x), exact(low)), new(big.Float).Sub(exact(high), exact(x))
	want := h
	if c := down.Cmp(up); c > 0 || c == 0 && h&1 == 1 {
		want++
	}
	if got := narrow(x); got != want {
		t.Fatalf("%v between %v and %v: got %#04x, want %#04x", x, low, high, got, want)
	}
	if got := narrow(-x); got != want|0x8000 {
		t.Fatalf("%v: got %#04x, want %#04x", -x, got, want|0x8000)
	}
}
