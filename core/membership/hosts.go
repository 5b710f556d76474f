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
	return all.several()
}

func (h HostSums) several() HostSums {
	return slices.DeleteFunc(h, func(ranks []int) bool { return len(ranks) < 2 })
}

// Among is what is left where only some ranks take part: each host's among them.
func (h HostSums) Among(members rankset.Set) HostSums {
	var among HostSums
	for _, ranks := range h {
		among = append(among, slices.DeleteFunc(slices.Clone(ranks), func(rank int) bool { return !members.Has(rank) }))
	}
	return among.several()
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

// Behind is whom pushes of a partition are of: with a representative its whole host.
func (h HostSums) Behind(pushed rankset.Set, tensor, part uint32) rankset.Set {
	if len(h) == 0 {
		return pushed
	}
	behind := pushed.Clone()
	for _, ranks := range h {
		if !behind.Has(Representative(ranks, tensor, part)) {
			continue
		}
		for _, rank := range ranks {
			behind.Add(rank)
		}
	}
	return behind
}
