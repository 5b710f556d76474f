package placement

import "slices"

// newOptimus makes the strategy of Optimus (EuroSys '18, section 5.3): every server has room for its share of all bytes.
// The largest tensor goes first, to the server where it leaves the least room; one that is larger than a share is sliced
// into shares, each for the emptiest server; and one that is smaller than a hundredth of a share goes to the server with the fewest partitions, which
// are the requests that it has to handle.
func newOptimus(*Arguments) Strategy {
	return Strategy{
		Over: func(w []float64) Placer {
			return &optimus{newDealer(w, frameBytes, true), newDealer(w, func(uint32) float64 { return 1 }, false)}
		},
		Width: whole,
	}
}

// tinyShare is the part of a server's share below which a tensor counts as a request and not as bytes.
const tinyShare = 0.01

type optimus struct{ held, requests *dealer }

// Add implements Placer.
func (o *optimus) Add(parts []uint32, servers []int) {
	o.held.Add(parts, servers)
	o.requests.Add(parts, servers)
}

// Remove implements Placer.
func (o *optimus) Remove(parts []uint32, servers []int) {
	o.held.Remove(parts, servers)
	o.requests.Remove(parts, servers)
}

// Place implements Placer.
func (o *optimus) Place(tensors []Load) [][]int {
	var total float64
	for _, t := range tensors {
		total += o.held.sum(t.Parts)
	}
	for _, load := range o.held.load {
		total += load
	}
	placed := make([][]int, len(tensors))
	for _, i := range largest(len(tensors), func(i int) uint64 { return bytes(tensors[i]) }) {
		placed[i] = o.place(tensors[i], total)
		o.Add(tensors[i].Parts, placed[i])
	}
	return placed
}

// place finds servers for one tensor of a model of total bytes.
func (o *optimus) place(t Load, total float64) []int {
	size, share := o.held.sum(t.Parts), total/float64(len(weighted(o.held.weights)))
	switch {
	case size > share:
		return o.slice(t, share)
	case t.Home != Free:
		return all(t.Home, len(t.Parts))
	case size < tinyShare*share:
		return all(o.requests.ranking(make([]int, len(o.requests.weights)), 1)[0], len(t.Parts))
	}
	room := func(s int) float64 { return total*o.held.weights[s]/o.held.total - o.held.load[s] }
	best := -1
	for _, s := range weighted(o.held.weights) {
		if room(s) >= size && (best < 0 || room(s) < room(best)) {
			best = s
		}
	}
	if best < 0 {
		best = o.held.ranking(make([]int, len(o.held.weights)), size)[0]
	}
	return all(best, len(t.Parts))
}

// slice deals a tensor in slices of one share each.
func (o *optimus) slice(t Load, share float64) []int {
	load := slices.Clone(o.held.load)
	placed := make([]int, len(t.Parts))
	server, size := t.Home, 0.0
	for k, part := range t.Parts {
		if server == Free || size > 0 && size+o.held.cost(part) > share {
			server, size = least(weighted(o.held.weights), func(s int) float64 { return load[s] / o.held.weights[s] }), 0
		}
		placed[k] = server
		size += o.held.cost(part)
		load[server] += o.held.cost(part)
	}
	return placed
}
