package placement

// newTensorRoundRobin makes the strategy that deals whole tensors in turn, as the modularized parameter server's round-robin: the
// next one goes to the server with the fewest for its weight.
func newTensorRoundRobin(*Arguments) Strategy {
	return wholesBy(func(w *wholes, _ Load) int {
		after := func(s int) float64 { return float64(w.tensors[s]+1) / w.weights[s] }
		return least(weighted(w.weights), after)
	})
}
