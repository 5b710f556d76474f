package placement

// newTensorRoundRobin makes the strategy that deals whole tensors in turn (algorithms.md section 2): the next one goes to
// the server with the fewest for its weight.
func newTensorRoundRobin(*Arguments) Strategy {
	return wholesBy(func(w *wholes, _ Load) int {
		fewest := weighted(w.weights)[0]
		for s, weight := range w.weights {
			if weight > 0 && float64(w.tensors[s]+1)/weight < float64(w.tensors[fewest]+1)/w.weights[fewest] {
				fewest = s
			}
		}
		return fewest
	})
}
