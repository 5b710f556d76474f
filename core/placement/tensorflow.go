package placement

// newTensorFlow makes TensorFlow's strategy (PSLD section 2.2; the round-robin of tf.train.replica_device_setter): tensor
// number k goes to server k mod n, whatever the servers hold and are.
func newTensorFlow(*Arguments) Strategy {
	return wholesBy(func(w *wholes, _ Load) int {
		placed := 0
		for _, n := range w.tensors {
			placed += n
		}
		servers := weighted(w.weights)
		return servers[placed%len(servers)]
	})
}
