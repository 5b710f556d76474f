package placement

// newRoundRobin makes the strategy that deals partitions in turn, whatever their size.
func newRoundRobin(*Arguments) Strategy {
	one := func(uint32) float64 { return 1 }
	return Strategy{Over: func(w []float64) Placer { return newDealer(w, one, false) }}
}
