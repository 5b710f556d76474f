package placement

// newProportional makes the strategy that PSLD calls the strawman (section 6.1): every server has bytes in
// proportion to its profiled speed. TRIGGER (1) is the variation of speeds, (best - worst) / worst, that asks for a remap, where the predicted times of their
// keys vary as much: when shares are in proportion they settle.
func newProportional(a *Arguments) Strategy {
	trigger := a.number("TRIGGER", 1, 1000)
	return Strategy{
		Over: largestFirst,
		Remap: func(s Situation) []int {
			weights := s.Profiles.Speeds(len(s.Weights))
			for i, w := range s.Weights {
				if w == 0 {
					weights[i] = 0
				}
			}
			return s.even(weights)
		},
		Judge: func(s Situation) Verdict {
			return Verdict{Remap: s.variation() > trigger && s.unevenness(weighted(s.Weights)) > trigger}
		},
	}
}
