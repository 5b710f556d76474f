package membership

import (
	"fmt"
	"slices"
	"testing"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/rankset"
)

func TestHostsWithSeveralWorkersAndNoServerSumFirst(t *testing.T) {
	for _, c := range []struct {
		what    string
		workers []string // their hosts; in capitals those that offer no sums
		servers []string
		elastic bool
		want    HostSums
	}{
		{"two hosts of two", []string{"a", "a", "b", "b"}, []string{"s"}, false, HostSums{{0, 1}, {2, 3}}},
		{"ranks that alternate", []string{"a", "b", "a", "b"}, []string{"s"}, false, HostSums{{0, 2}, {1, 3}}},
		{"one host has one worker", []string{"a", "b", "b"}, []string{"s"}, false, HostSums{{1, 2}}},
		{"a server is on one of them", []string{"a", "a", "b", "b"}, []string{"s", "b"}, false, HostSums{{0, 1}}},
		{"some do not offer it", []string{"a", "A", "a", "B", "b"}, []string{"s"}, false, HostSums{{0, 2}}},
		{"an elastic job", []string{"a", "a"}, []string{"s"}, true, nil},
	} {
		var workers, servers []Node
		for i, host := range c.workers {
			offers := host >= "a"
			n := Node{Incarnation: uint64(i + 1), Host: host, HostSums: offers}
			if offers {
				n.Addresses = at(fmt.Sprint("w", i))
			} else {
				n.Host = string(host[0] - 'A' + 'a')
			}
			workers = append(workers, n)
		}
		for i, host := range c.servers {
			servers = append(servers, Node{Incarnation: uint64(i + 100), Host: host, Addresses: at(fmt.Sprint("s", i))})
		}
		e, err := Found(1, placement.Default, workers, servers)
		if err != nil {
			t.Fatal(err)
		}
		e.Elastic = c.elastic
		if got := e.HostSums(); !slices.EqualFunc(got, c.want, slices.Equal) {
			t.Errorf("%s: %v, want %v", c.what, got, c.want)
		}
		if len(e.Servers) != len(servers) {
			t.Errorf("%s: the job has %d servers, want %d: those that sum for their hosts get no keys", c.what, len(e.Servers), len(servers))
		}
	}
}

func TestOneRankPushesForItsHost(t *testing.T) {
	h := HostSums{{0, 2}, {1, 3, 4}}
	for _, c := range []struct{ live, pushing, behind []int }{
		{[]int{0, 1, 2, 3, 4, 5}, []int{2, 3, 5}, []int{0, 1, 2, 3, 4, 5}},
		{[]int{0, 5}, []int{2, 5}, []int{0, 2, 5}}, // also for a rank that takes part no more
		{[]int{5}, []int{5}, []int{5}},
	} {
		pushing := h.Pushing(rankset.Of(c.live...), 6, 1)
		behind := pushing.Clone()
		h.AddBehind(&behind, 6, 1)
		if !slices.Equal(pushing.Ranks(), c.pushing) || !slices.Equal(behind.Ranks(), c.behind) {
			t.Errorf("live %v: %v push for %v, want %v for %v", c.live, pushing, behind, c.pushing, c.behind)
		}
	}
	for _, c := range []struct {
		bytes int64
		ranks []int
		want  HostSums
	}{
		{16 << 10, []int{0, 1, 4}, HostSums{{1, 4}}},
		{16<<10 - 1, []int{0, 1, 4}, nil}, // little is spared
		{8 << 10, []int{0, 1, 2, 3, 4}, HostSums{{1, 3, 4}}},
		{0, []int{0, 1, 2, 3, 4}, nil},
		{1 << 40, []int{0, 1}, nil},
	} {
		if among := h.Among(rankset.Of(c.ranks...), c.bytes); !slices.EqualFunc(among, c.want, slices.Equal) {
			t.Errorf("%d bytes among %v: %v, want %v", c.bytes, c.ranks, among, c.want)
		}
	}
	counts := map[int]int{}
	for part := range uint32(9) {
		counts[Representative(h[1], 3, part)]++
	}
	if counts[1] != 3 || counts[3] != 3 || counts[4] != 3 {
		t.Errorf("of 9 partitions the ranks push %v, want 3 each", counts)
	}
}
