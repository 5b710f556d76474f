package codec

// Momentum is what a codec may tell of itself beyond [Codec]: the factor of the momentum that it sums gradients with.
// It takes the place of the optimizer's; 0 is none.
type Momentum interface{ Momentum() float64 }

// Traits are a codec's properties, for those who use it by its setting.
type Traits struct {
	Setting  string  `json:"setting"`  // in the form that Parse makes the same codec of
	Unbiased bool    `json:"unbiased"` // see Codec.Unbiased
	Precise  bool    `json:"precise"`  // see Codec.Precise
	Residual int     `json:"residual"` // bytes per element of float32
	Momentum float64 `json:"momentum"` // see Momentum
}

// TraitsOf gives the codec's properties.
func TraitsOf(c Codec) Traits {
	return Traits{c.String(), c.Unbiased(), c.Precise(), c.ResidualBytes(1), momentumOf(c)}
}

func momentumOf(c Codec) float64 {
	if m, ok := c.(Momentum); ok {
		return m.Momentum()
	}
	return 0
}
