package placement

import (
	"cmp"
	"math"
	"slices"
)

// dealer distributes a tensor's partitions: every server gets its integral share of them, and the rest goes to
// the servers with the least load for their weight. So a tensor spreads over all
// servers, and of equal servers the most and the least loaded differ by no more than the largest
// partition (dealer's test shows both).
type dealer struct {
	weights []float64
	total   float64
	load    []float64 // cost of each server's partitions
	cost    func(part uint32) float64
	sorted  bool // place the largest tensors of a batch first
}

func newDealer(weights []float64, cost func(uint32) float64, sorted bool) *dealer {
	d := &dealer{weights: weights, load: make([]float64, len(weights)), cost: cost, sorted: sorted}
	for _, w := range weights {
		d.total += w
	}
	return d
}

// Place implements Placer.
func (d *dealer) Place(tensors []Load) [][]int {
	size := func(int) uint64 { return 0 } // in their order
	if d.sorted {
		size = func(i int) uint64 { return bytes(tensors[i]) }
	}
	placed := make([][]int, len(tensors))
	for _, i := range largest(len(tensors), size) {
		placed[i] = d.deal(tensors[i])
		d.Add(tensors[i].Parts, placed[i])
	}
	return placed
}

// Add implements Placer.
func (d *dealer) Add(parts []uint32, servers []int) {
	for i, s := range servers {
		d.load[s] += d.cost(parts[i])
	}
}

// Remove implements Placer.
func (d *dealer) Remove(parts []uint32, servers []int) {
	for i, s := range servers {
		d.load[s] -= d.cost(parts[i])
	}
}

// sum is the cost of partitions together.
func (d *dealer) sum(parts []uint32) (sum float64) {
	for _, part := range parts {
		sum += d.cost(part)
	}
	return sum
}

// deal chooses the servers of one tensor's partitions.
func (d *dealer) deal(t Load) []int {
	if len(t.Parts) == 0 {
		return nil
	}
	hands, left := d.shares(len(t.Parts))
	if t.Home != Free && hands[t.Home] == 0 {
		if left--; left < 0 {
			left = 0
			hands[slices.Index(hands, slices.Max(hands))]--
		}
		hands[t.Home] = 1
	}
	ranking := d.ranking(hands, d.cost(t.Parts[0]))
	for _, s := range ranking {
		if left > 0 && hands[s] == int(d.share(s, len(t.Parts))) {
			hands[s]++ // but not a home that got one above
			left--
		}
	}
	start := t.Home
	if start == Free {
		start = ranking[0]
	}
	return inTurn(hands, start, len(t.Parts))
}

// share is server s's number of the n partitions by its weight.
func (d *dealer) share(s, n int) float64 { return math.Floor(float64(n) * d.weights[s] / d.total) }

// shares lists all servers' shares, and the number of the n partitions left over.
func (d *dealer) shares(n int) (hands []int, left int) {
	hands, left = make([]int, len(d.weights)), n
	for s := range hands {
		hands[s] = min(int(d.share(s, n)), left)
		left -= hands[s]
	}
	return hands, left
}

// ranking lists the servers of weight above 0 by the load that they would have, for their weight, with
// their hands and one more partition of that cost.
func (d *dealer) ranking(hands []int, cost float64) []int {
	var order []int
	after := make([]float64, len(hands))
	for s, w := range d.weights {
		if w > 0 {
			after[s] = (d.load[s] + float64(hands[s]+1)*cost) / w
			order = append(order, s)
		}
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(after[a], after[b]) })
	return order
}

// inTurn lays the n partitions in hands out so that neighbours go to different servers, from start on.
func inTurn(hands []int, start, n int) []int {
	servers := make([]int, 0, n)
	for s := start; len(servers) < n; s = (s + 1) % len(hands) {
		if hands[s] > 0 {
			hands[s]--
			servers = append(servers, s)
		}
	}
	return servers
}

// largest lists the numbers below n by their sizes, the largest first and equal ones in their order.
func largest(n int, size func(int) uint64) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(size(b), size(a)) })
	return order
}

func bytes(t Load) (sum uint64) {
	for _, p := range t.Parts {
		sum += uint64(p)
	}
	return sum
}
