package placement

import (
	"cmp"
	"slices"
)

// wholes places whole tensors: all partitions of one go to one server, that of its home if it has one.
type wholes struct {
	weights []float64
	tensors []int // on each server, where several have parts of one each of them counts it
	choose  func(w *wholes, t Load) int
}

// whole is the Width of a tensor that goes to one server.
func whole(uint64, int) int { return 1 }

func wholesBy(choose func(w *wholes, t Load) int) Strategy {
	over := func(weights []float64) Placer {
		return &wholes{weights: weights, tensors: make([]int, len(weights)), choose: choose}
	}
	return Strategy{Over: over, Width: whole}
}

// Place implements Placer.
func (w *wholes) Place(tensors []Load) [][]int {
	placed := make([][]int, len(tensors))
	for i, t := range tensors {
		s := t.Home
		if s == Free {
			s = w.choose(w, t)
		}
		placed[i] = all(s, len(t.Parts))
		w.Add(t.Parts, placed[i])
	}
	return placed
}

// Add implements Placer.
func (w *wholes) Add(_ []uint32, servers []int) { w.count(servers, 1) }

// Remove implements Placer.
func (w *wholes) Remove(_ []uint32, servers []int) { w.count(servers, -1) }

func (w *wholes) count(servers []int, by int) {
	seen := map[int]bool{}
	for _, s := range servers {
		if !seen[s] {
			seen[s] = true
			w.tensors[s] += by
		}
	}
}

// all is the servers of n partitions that go to server s.
func all(s, n int) []int { return slices.Repeat([]int{s}, n) }

// least is the server of which a number is the least; of equal ones the first.
func least(servers []int, number func(s int) float64) int {
	return slices.MinFunc(servers, func(a, b int) int { return cmp.Compare(number(a), number(b)) })
}

// weighted lists the servers of weight above 0.
func weighted(weights []float64) (servers []int) {
	for s, w := range weights {
		if w > 0 {
			servers = append(servers, s)
		}
	}
	return servers
}
