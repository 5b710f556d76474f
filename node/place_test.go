package node

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/core/membership"
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
