package placement

// newUniform makes the strategy of the modularized parameter server's uniform split: every
// tensor over all servers, however small it is.
func newUniform(*Arguments) Strategy {
	return Strategy{Over: func(w []float64) Placer { return newDealer(w, frameBytes, false) }, Least: 1}
}
