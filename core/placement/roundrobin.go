package placement

// newRoundRobin makes the placer that deals partitions in turn, whatever their size.
func newRoundRobin(arguments string) (func(weights []float64) Placer, error) {
	one := func(uint32) float64 { return 1 }
	return func(w []float64) Placer { return newDealer(w, one, false) }, noArguments(arguments)
}
