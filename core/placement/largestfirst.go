package placement

// newLargestFirst makes the strategy of the modularized parameter server's heuristic (Algorithm 2):
// the largest tensor first, onto the least loaded servers.
func newLargestFirst(*Arguments) Strategy { return Strategy{Over: largestFirst} }

func largestFirst(weights []float64) Placer { return newDealer(weights, frameBytes, true) }

// frameBytes is the cost of a partition on the wire: its bytes and a header. Without the header all
// empty partitions would lie on one server.
func frameBytes(part uint32) float64 { return float64(part) + 64 }
