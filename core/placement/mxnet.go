package placement

import "slices"

// bigArray is MXNET_KVSTORE_BIGARRAY_BOUND, 10^6 elements, in bytes of float32.
const bigArray = 4_000_000

// newMXNet makes MXNet's strategy (PSLD section 2.2): tensors of BOUND bytes (4,000,000) and more are split
// evenly over all servers; a smaller one goes to a server by a hash of its number, whatever that holds.
func newMXNet(a *Arguments) Strategy {
	bound := uint64(a.number("BOUND", bigArray, 1<<40))
	return Strategy{
		Over: func(w []float64) Placer { return mxnet{weighted(w), bound} },
		Width: func(bytes uint64, servers int) int {
			if bytes < bound {
				return 1
			}
			return servers
		},
	}
}

type mxnet struct {
	servers []int
	bound   uint64
}

// Place implements Placer.
func (m mxnet) Place(tensors []Load) [][]int {
	placed := make([][]int, len(tensors))
	for i, t := range tensors {
		switch {
		case bytes(t) >= m.bound:
			placed[i] = m.split(t)
		case t.Home != Free:
			placed[i] = all(t.Home, len(t.Parts))
		default: // kvstore_dist.h's hash, which is round-robin over the numbers where 9973 mod n is 1
			placed[i] = all(m.servers[uint64(t.Number)*9973%uint64(len(m.servers))], len(t.Parts))
		}
	}
	return placed
}

// split deals the partitions of a tensor to all servers in turn, from its home on.
func (m mxnet) split(t Load) []int {
	placed, start := make([]int, len(t.Parts)), max(0, slices.Index(m.servers, t.Home))
	for k := range placed {
		placed[k] = m.servers[(start+k)%len(m.servers)]
	}
	if t.Home != Free && len(placed) > 0 {
		placed[0] = t.Home
	}
	return placed
}

// Add implements Placer.
func (mxnet) Add([]uint32, []int) {}

// Remove implements Placer.
func (mxnet) Remove([]uint32, []int) {}
