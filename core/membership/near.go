package membership

import (
	"slices"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

// Exchange is what decides which servers are near to a tensor's bytes.
type Exchange struct {
	Kind  units.Kind
	Ranks []int // of the process set
	Root  int   // of a broadcast
	Rows  int64 // of a reducescatter
}

// Near chooses the server of each partition so that no byte crosses a link more often than it must. It is nil where the
// policy decides: for other kinds, and where a rank has no server in its process, or dedicated servers share the load.
//
//   - A partition of a reducescatter is summed in the process of the rank that gets it.
//   - A broadcast's partitions go to the other ranks' servers in turn, so that the root sends each byte once and
//     each of the others passes an equal share on. From the root's own server, which sends it to each
//     reader, comes what has one reader, and what is so small that a second hop costs more.
func (d *Dealer) Near(x Exchange, number uint32, parts []uint32) []int {
	e := d.epoch
	if e.Mixed() || x.Kind != units.Broadcast && x.Kind != units.Reducescatter {
		return nil
	}
	own := make([]int, len(x.Ranks))
	for i, rank := range x.Ranks {
		if own[i] = e.Embedded(rank); own[i] < 0 {
			return nil
		}
	}
	servers := make([]int, len(parts))
	if x.Kind == units.Reducescatter {
		nearReceivers(servers, own, x.Rows, parts)
		return servers
	}
	others, direct := slices.Clone(own), slices.Index(x.Ranks, x.Root)
	if direct < 0 {
		return nil
	}
	others = slices.Delete(others, direct, direct+1)
	for i, bytes := range parts {
		servers[i] = own[direct]
		if len(others) > 1 && bytes >= limits.MinPartition {
			servers[i] = others[(int(number)+i)%len(others)]
		}
	}
	return servers
}

// nearReceivers puts each partition on the server of the rank that gets its rows.
func nearReceivers(servers, own []int, rows int64, parts []uint32) {
	var total, offset int64
	for _, bytes := range parts {
		total += int64(bytes)
	}
	receiver := 0
	for i, bytes := range parts {
		for receiver+1 < len(own) {
			_, end := placement.Rows(rows, len(own), receiver)
			if offset < end*(total/max(rows, 1)) {
				break
			}
			receiver++
		}
		servers[i] = own[receiver]
		offset += int64(bytes)
	}
}
