package node

import (
	"fmt"
	"strings"
	"testing"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
)

// TestPlacesOfWorkers by the hosts of all, where the launcher does not say them.
func TestPlacesOfWorkers(t *testing.T) {
	for _, c := range []struct {
		hosts       string // of each rank, by letter
		rank        int
		want        [4]int // local rank and size, cross rank and size
		homogeneous bool
	}{
		{"a", 0, [4]int{0, 1, 0, 1}, true},
		{"aabb", 3, [4]int{1, 2, 1, 2}, true},
		{"abab", 1, [4]int{0, 2, 1, 2}, true},
		{"aab", 2, [4]int{0, 1, 1, 2}, false},
		{"aab", 1, [4]int{1, 2, 0, 1}, false},
		{"abbc", 3, [4]int{0, 1, 2, 3}, false},
	} {
		w := &Worker{}
		s := &w.Settings
		s.Rank, s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize = c.rank, -1, -1, -1, -1
		epoch := &membership.Epoch{}
		for _, host := range c.hosts {
			epoch.Workers = append(epoch.Workers, membership.Worker{Node: membership.Node{Host: string(host)}})
		}
		w.Membership = membership.NewView(epoch)
		w.place()
		if w.cut(); (s.PartitionBytes == embeddedPartition) != (strings.Count(c.hosts, "a") == len(c.hosts)) {
			t.Errorf("rank %d on %s: partitions of %d bytes", c.rank, c.hosts, s.PartitionBytes)
		}
		if got := [4]int{s.LocalRank, s.LocalSize, s.CrossRank, s.CrossSize}; got != c.want || w.Homogeneous != c.homogeneous {
			t.Errorf("rank %d on %s: %v, homogeneous %v", c.rank, c.hosts, got, w.Homogeneous)
		}
	}
}

// TestRanksCutAlikeWhateverEpochTheyBeginWith: a server may join an elastic job, or be lost, after some ranks have begun and before others have.
func TestRanksCutAlikeWhateverEpochTheyBeginWith(t *testing.T) {
	server := func(port int) membership.Node {
		return membership.Node{Incarnation: uint64(port), Addresses: address.List{{Kind: "tcp", At: fmt.Sprint("a:", port)}}}
	}
	worker := membership.Node{Incarnation: 9}
	for what, c := range map[string]struct {
		workers, dedicated []membership.Node
		change             membership.Change
	}{
		"a server joins those in workers": {[]membership.Node{server(1)}, nil, membership.Change{Servers: []membership.Node{server(2)}}},
		"a server of its own is lost": {[]membership.Node{worker, server(1)}, []membership.Node{server(2)}, membership.Change{
			Lose: []membership.Loss{{Member: membership.Member{Role: membership.ServerRole, Number: 1}}},
		}},
	} {
		first, err := membership.Found(1, "", c.workers, c.dedicated)
		if err != nil {
			t.Fatal(what, err)
		}
		first.Elastic = true
		second, err := first.Next(c.change)
		if err != nil {
			t.Fatal(what, err)
		}
		var cuts []int64
		for _, epoch := range []*membership.Epoch{first, second} {
			w := &Worker{Membership: membership.NewView(epoch)}
			w.cut()
			cuts = append(cuts, w.Settings.PartitionBytes)
		}
		if first.Mixed() == second.Mixed() || cuts[0] != cuts[1] {
			t.Errorf("%s: partitions of %v bytes", what, cuts)
		}
	}
}
