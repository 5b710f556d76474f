package membership

import (
	"slices"

	"github.com/paceline/paceline/core/placement"
)

// blocks is the keys of an epoch as a remap moves them: each partition, but the first partitions of all tensors of a name
// together, because they share their home.
type blocks struct {
	list  []placement.Block
	first map[Name]int // which block has the first partitions of a name; pinned for none
	at    map[uint32][]int
}

// pinned is the number of no block: the partition keeps its server.
const pinned = -1

// blocksOf lists the keys of tensors as blocks. Some tensors keep the servers that stay.
func blocksOf(tensors []*Tensor, stays func(server int) bool) blocks {
	b := blocks{first: map[Name]int{}, at: map[uint32][]int{}}
	for _, t := range tensors {
		if t.stays() && stays(t.Servers[0]) {
			b.first[t.Name] = pinned
		}
	}
	for _, t := range tensors {
		at := make([]int, len(t.Parts))
		for part, s := range t.Servers {
			switch first, known := b.first[t.Name]; {
			case part == 0 && known:
				at[0] = first
				if first != pinned {
					b.list[first].Bytes += uint64(t.Parts[0])
				}
				continue
			case part > 0 && t.stays() && stays(s):
				at[part] = pinned
				continue
			case part == 0:
				b.first[t.Name] = len(b.list)
			}
			at[part] = len(b.list)
			block := placement.Block{Bytes: uint64(t.Parts[part]), Server: placement.Free}
			if stays(s) {
				block.Server = s
			}
			b.list = append(b.list, block)
		}
		b.at[t.Number] = at
	}
	return b
}

// situation is what the policy knows of the epoch for a change.
func (e *Epoch) situation(b blocks, c Change) placement.Situation {
	return placement.Situation{Blocks: b.list, Weights: e.Weights(), Profiles: c.Profiles, Initial: e.Founders(), Seed: e.Round + uint64(e.Number) + uint64(c.Tries)}
}

// Judge is what the profiles of the servers ask for: a change with these profiles, or one more server.
func (e *Epoch) Judge(profiles placement.Profiles) (placement.Verdict, error) {
	policy, err := placement.Parse(e.Policy)
	if err != nil {
		return placement.Verdict{}, err
	}
	b := blocksOf(e.Keys.all(), func(s int) bool { return e.Servers[s].State == Live })
	return policy.Judge(e.situation(b, Change{Profiles: profiles})), nil
}

// remap has the policy decide on the keys of the epoch before.
func (d *Dealer) remap(tensors []*Tensor, c Change, stays func(server int) bool) error {
	b := blocksOf(tensors, stays)
	servers, err := d.policy.Remap(d.epoch.situation(b, c))
	if err != nil {
		return err
	}
	for _, t := range tensors {
		now := slices.Clone(t.Servers)
		for part, block := range b.at[t.Number] {
			if block != pinned {
				now[part] = servers[block]
			}
		}
		if !slices.Equal(now, t.Servers) || slices.ContainsFunc(t.Servers, func(s int) bool { return !stays(s) }) {
			moved := *t
			moved.Servers = now
			t = &moved
		}
		d.Learn(t)
	}
	return nil
}
