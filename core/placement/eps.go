package placement

import "slices"

// newEPS makes FluentPS's elastic parameter slicing (section III-A): every server has the same bytes,
// and has them again after every change of the servers. A remap moves no more than it must: what has lost its server,
// and from the fullest server to the emptiest as long as that makes the two more alike.
func newEPS(*Arguments) Strategy {
	return Strategy{Over: largestFirst, Remap: func(s Situation) []int { return s.even(s.Weights) }}
}

// even finds servers with shares by these weights: no two of equal weight differ by more than the largest block.
func (s *Situation) even(weights []float64) []int {
	e := evener{servers: weighted(weights), weights: weights, load: make([]float64, len(weights)), on: make([][]int, len(weights)), blocks: s.Blocks}
	var homeless []int
	for _, i := range largest(len(s.Blocks), func(i int) uint64 { return s.Blocks[i].Bytes }) {
		if at := s.Blocks[i].Server; at != Free && weights[at] > 0 {
			e.put(i, at)
		} else {
			homeless = append(homeless, i)
		}
	}
	for _, i := range homeless {
		e.put(i, e.emptiest(e.cost(i)))
	}
	for e.move() {
	}
	servers := make([]int, len(s.Blocks))
	for at, blocks := range e.on {
		for _, i := range blocks {
			servers[i] = at
		}
	}
	return servers
}

// evener moves blocks from full servers to empty ones.
type evener struct {
	blocks  []Block
	servers []int // of weight above 0
	weights []float64
	load    []float64
	on      [][]int // the blocks of each server
}

func (e *evener) cost(i int) float64 { return float64(e.blocks[i].Bytes) + 64 }

func (e *evener) put(i, server int) {
	e.on[server] = append(e.on[server], i)
	e.load[server] += e.cost(i)
}

// emptiest is the server that is the least full for its weight with these bytes more.
func (e *evener) emptiest(bytes float64) int {
	return least(e.servers, func(s int) float64 { return (e.load[s] + bytes) / e.weights[s] })
}

// move moves the largest block from the fullest server that leaves its next server less full than that was.
func (e *evener) move() bool {
	full := least(e.servers, func(s int) float64 { return -e.load[s] / e.weights[s] })
	best, to := -1, -1
	for k, i := range e.on[full] {
		if best >= 0 && e.blocks[i].Bytes <= e.blocks[e.on[full][best]].Bytes {
			continue
		}
		s := e.emptiest(e.cost(i))
		if (e.load[s]+e.cost(i))/e.weights[s] < e.load[full]/e.weights[full] {
			best, to = k, s
		}
	}
	if best < 0 {
		return false
	}
	i := e.on[full][best]
	e.on[full] = slices.Delete(e.on[full], best, best+1)
	e.load[full] -= e.cost(i)
	e.put(i, to)
	return true
}
