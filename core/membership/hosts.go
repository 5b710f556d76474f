package membership

import (
	"slices"

	"github.com/paceline/paceline/internal/rankset"
)

// HostSums are the hosts whose workers sum among themselves first: the ranks of each, rising, two at least. For every key
// one of them, the representative, pushes the sum of all.
type HostSums [][]int

// HostSums finds the hosts with several workers that offer it (Node.HostSums) and no server of the job, to which a byte
// would cross no link. There are none in an elastic job.
func (e *Epoch) HostSums() HostSums {
	if e.Elastic {
		return nil
	}
	hosts := map[string]int{} // place of each in all; -1 where a server is
	for i := range e.Servers {
		hosts[e.Servers[i].Host] = -1
	}
	var all HostSums
	for rank := range e.Workers {
		w := &e.Workers[rank]
		if !w.HostSums {
			continue
		}
		i, known := hosts[w.Host]
		if !known {
			i, all = len(all), append(all, nil)
			hosts[w.Host] = i
		}
		if i >= 0 {
			all[i] = append(all[i], rank)
		}
	}
	return slices.DeleteFunc(all, func(ranks []int) bool { return len(ranks) < 2 })
}

// leastSpared is what a sum of a host spares its link in each direction, in bytes: where it is less, the way over another process takes
// longer. On links of 1 Gbit/s that is so below 24 KiB; it is fewer, because small tensors that travel together share that way.
const leastSpared = 16 << 10

// SumFirst reports whether so many ranks of one host sum a tensor of these bytes first.
func SumFirst(ranks int, bytes int64) bool {
	return ranks > 1 && bytes >= leastSpared/int64(ranks-1)
}

// Among is what is left for a tensor of these bytes where only some ranks take part: each host's among them.
func (h HostSums) Among(members rankset.Set, bytes int64) HostSums {
	var among HostSums
	for _, ranks := range h {
		ranks = slices.DeleteFunc(slices.Clone(ranks), func(rank int) bool { return !members.Has(rank) })
		if SumFirst(len(ranks), bytes) {
			among = append(among, ranks)
		}
	}
	return among
}

// Of is the ranks of a rank's host, nil where it pushes for itself.
func (h HostSums) Of(rank int) []int {
	for _, ranks := range h {
		if slices.Contains(ranks, rank) {
			return ranks
		}
	}
	return nil
}

// Representative is the one of a host's ranks that pushes their sum of a partition: each of them in turn.
func Representative(ranks []int, tensor, part uint32) int {
	return ranks[(uint64(tensor)+uint64(part))%uint64(len(ranks))]
}

// Pushing is who pushes a partition where these ranks take part in it: a host's representative, whether it takes part itself
// or not.
func (h HostSums) Pushing(live rankset.Set, tensor, part uint32) rankset.Set {
	if len(h) == 0 {
		return live
	}
	pushing := live.Clone()
	for _, ranks := range h {
		any := false
		for _, rank := range ranks {
			any = pushing.Remove(rank) || any
		}
		if any {
			pushing.Add(Representative(ranks, tensor, part))
		}
	}
	return pushing
}

// AddBehind adds whom pushes of a partition are of: with a representative its whole host.
func (h HostSums) AddBehind(pushed *rankset.Set, tensor, part uint32) {
	for _, ranks := range h {
		if !pushed.Has(Representative(ranks, tensor, part)) {
			continue
		}
		for _, rank := range ranks {
			pushed.Add(rank)
		}
	}
}
