package placement

// newUniform makes the strategy of the modularized parameter server's uniform split (algorithms.md section 2): every
// tensor over all servers, however small it is.
func newUniform(*Arguments) Strategy {
	return Strategy{Over: func(w []float64) Placer { return newDealer(w, frameBytes, false) }, Least: 1}
}
