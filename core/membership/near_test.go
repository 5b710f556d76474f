package membership

import (
	"slices"
	"testing"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/units"
)

func TestPartitionsAreNearToTheRanksThatSendOrGetThem(t *testing.T) {
	const big = 1 << 20
	scatter := func(rows int64, ranks ...int) Exchange {
		return Exchange{Kind: units.Reducescatter, Ranks: ranks, Rows: rows}
	}
	broadcast := func(root int, ranks ...int) Exchange {
		return Exchange{Kind: units.Broadcast, Ranks: ranks, Root: root}
	}
	for _, c := range []struct {
		what              string
		workers, outside  int
		x                 Exchange
		number            uint32
		parts             []uint32
		want              []int
		withoutServerRank int
	}{
		{"two partitions for each of two ranks", 2, 0, scatter(8, 0, 1), 1, []uint32{2, 2, 2, 2}, []int{0, 0, 1, 1}, -1},
		{"the first rank has a row more", 3, 0, scatter(5, 0, 2), 1, []uint32{4, 8, 8}, []int{0, 0, 2}, -1},
		{"more ranks than rows", 3, 0, scatter(2, 0, 1, 2), 1, []uint32{8, 8}, []int{0, 1}, -1},
		{"no rows", 2, 0, scatter(0, 0, 1), 1, []uint32{0}, []int{1}, -1},
		{"the root sends to the others in turn", 4, 0, broadcast(1, 0, 1, 2, 3), 3, []uint32{big, big, big, big}, []int{0, 2, 3, 0}, -1},
		{"another tensor begins with another rank", 4, 0, broadcast(1, 0, 1, 2, 3), 4, []uint32{big}, []int{2}, -1},
		{"small ones are read from the root", 4, 0, broadcast(1, 0, 1, 2, 3), 3, []uint32{4096}, []int{1}, -1},
		{"so is what has one reader", 3, 0, broadcast(2, 0, 2), 3, []uint32{big, big}, []int{2, 2}, -1},
		{"sums go where the policy says", 2, 0, Exchange{Kind: units.Allreduce, Ranks: []int{0, 1}}, 1, []uint32{big}, nil, -1},
		{"so do all beside dedicated servers", 2, 1, scatter(8, 0, 1), 1, []uint32{2, 2}, nil, -1},
		{"and with a rank without a server", 3, 0, broadcast(0, 0, 1, 2), 1, []uint32{big}, nil, 2},
	} {
		node := func(i int, serves bool) Node {
			n := Node{Incarnation: uint64(i + 1)}
			if serves {
				n.Addresses = at(string(rune('a' + i)))
			}
			return n
		}
		var workers, dedicated []Node
		for i := range c.workers {
			workers = append(workers, node(i, i != c.withoutServerRank))
		}
		for i := range c.outside {
			dedicated = append(dedicated, node(c.workers+i, true))
		}
		e, err := Found(1, placement.Default, workers, dedicated)
		if err != nil {
			t.Fatal(err)
		}
		d, err := NewDealer(e)
		if err != nil {
			t.Fatal(err)
		}
		near := d.Near(c.x, c.number, c.parts)
		if !slices.Equal(near, c.want) || (near == nil) != (c.want == nil) {
			t.Errorf("%s: servers %v, want %v", c.what, near, c.want)
		}
		// A name that is in use keeps its home server, here the last one.
		name := Name{Name: "x"}
		last := len(e.Servers) - 1
		d.Learn(&Tensor{Number: 100, Name: name, Parts: []uint32{1}, Servers: []int{last}})
		fresh := &Tensor{Number: c.number, Name: name, Parts: c.parts, Servers: near}
		d.Place([]*Tensor{fresh})
		if fresh.Servers[0] != last || near != nil && !slices.Equal(fresh.Servers[1:], c.want[1:]) || e.Keys.Of(c.number) != fresh {
			t.Errorf("%s: beside another tensor of its name it lies on %v", c.what, fresh.Servers)
		}
	}
}
