package control

import (
	"fmt"
	"maps"
	"slices"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// memory is what the scheduler has told this node in the running round, for a scheduler that is restarted.
// The client stores each answer before it passes it on, so that none is missing.
type memory struct {
	register wire.Register         // as this node last registered
	roster   *wire.Roster          // of the latest epoch
	tensors  map[string][]declared // by process set and name
	sets     map[uint32]wire.ProcessSet
	calls    uint64 // on process sets, answered or given up
	lastSet  uint32 // the greatest number of one: what is removed is not used again
	silent   string // wire.Known.Silent
	votes    wire.Votes
	farewell bool        // this worker has said goodbye to the servers
	lost     []wire.Lost // what this node has reported, until an epoch is without it: the line may have broken before
}

type declared struct {
	tensor wire.Tensor
	placed wire.Placed
}

func newMemory() memory {
	return memory{tensors: map[string][]declared{}, sets: map[uint32]wire.ProcessSet{}}
}

// learn stores what a message says and reports whether it brought the roster of a new round, or of a later epoch, or with others who have left. The
// request is nil where it was given up meanwhile, or where there was none.
func (k *memory) learn(r *request, m *wire.Control) (fresh bool) {
	if m.Roster != nil && (k.roster == nil || k.roster.Round != m.Roster.Round || k.roster.Epoch != m.Roster.Epoch || !slices.Equal(k.roster.Left, m.Roster.Left)) {
		if k.roster == nil || k.roster.Round != m.Roster.Round {
			k.lost, k.votes, k.farewell = nil, wire.Votes{}, false
		}
		k.roster = m.Roster
		k.lost = slices.DeleteFunc(k.lost, func(l wire.Lost) bool { return slices.ContainsFunc(k.roster.Gone, l.Same) })
		fresh = true
	}
	if m.Votes != nil {
		k.votes = *m.Votes
	}
	if r == nil {
		return fresh
	}
	if len(r.msg.Declare) == len(m.Placed) {
		for i, t := range r.msg.Declare {
			k.declared(t, m.Placed[i])
		}
	}
	if m.Set != nil {
		k.lastSet = max(k.lastSet, m.Set.ID)
	}
	switch {
	case m.Set == nil:
	case len(r.msg.FindSet) > 0:
		k.sets[m.Set.ID] = *m.Set
	case r.msg.Position == k.calls:
		if r.msg.RemoveID != 0 {
			k.removed(r.msg.RemoveID)
		} else {
			k.sets[m.Set.ID] = *m.Set
		}
		k.calls++
	}
	return fresh
}

// declared adds a tensor. A newer generation of a name replaces the older ones.
func (k *memory) declared(t wire.Tensor, p wire.Placed) {
	t.ID = p.ID
	key := fmt.Sprintf("%d %s", t.ProcessSet, t.Name)
	k.tensors[key] = append(slices.DeleteFunc(k.tensors[key], func(d declared) bool {
		return d.placed.ID == p.ID || d.tensor.Generation < t.Generation
	}), declared{t, p})
}

// reports adds a loss that this node reports. Of several connections to one peer the first may end before the silence is known.
func (k *memory) reports(l wire.Lost) {
	if i := slices.IndexFunc(k.lost, l.Same); i >= 0 {
		k.lost[i].Silent = k.lost[i].Silent || l.Silent
		return
	}
	k.lost = append(k.lost, l)
}

// silentPlaces are the standbys of workers that this node has found silent, and no epoch is without yet: in rank 0 is a scheduler that is at no standby.
func (k *memory) silentPlaces() (at []string) {
	for rank, n := range k.roster.Workers {
		if n.Standby != "" && n.Standby == k.silent || slices.ContainsFunc(k.lost, func(l wire.Lost) bool { return l.Silent && k.worker(l) == rank }) {
			at = append(at, n.Standby)
		}
	}
	if k.silent != "" && !slices.Contains(at, k.silent) {
		at = append(at, k.silent, k.roster.Workers[0].Standby)
	}
	return at
}

// worker is the rank of a worker that is lost, or with its server; -1 for a dedicated server.
func (k *memory) worker(l wire.Lost) int {
	switch {
	case l.Role == wire.RoleWorker:
		return l.Rank
	case l.Rank >= 0 && l.Rank < len(k.roster.Servers) && k.roster.Servers[l.Rank].Role == wire.RoleWorker:
		return k.roster.Servers[l.Rank].Rank
	}
	return -1
}

func (k *memory) removed(set uint32) {
	delete(k.sets, set)
	maps.DeleteFunc(k.tensors, func(_ string, d []declared) bool { return d[0].tensor.ProcessSet == set })
}

// registers are the messages by which this node registers again: several where one cannot hold what it
// knows, none before its first round.
func (k *memory) registers() []wire.Register {
	if k.roster == nil {
		return nil
	}
	var all []declared
	for _, key := range slices.Sorted(maps.Keys(k.tensors)) {
		all = append(all, k.tensors[key]...)
	}
	known := &wire.Known{Roster: *k.roster, SetCalls: k.calls, LastSet: k.lastSet, Silent: k.silent, Votes: k.votes, Farewell: k.farewell}
	for _, id := range slices.Sorted(maps.Keys(k.sets)) {
		known.Sets = append(known.Sets, k.sets[id])
	}
	r := k.register
	r.Known = known
	parts := []wire.Register{r}
	size := 0
	for _, d := range all {
		if size += sizeOf(&d.tensor); size > budget {
			parts[len(parts)-1].More = true
			known = &wire.Known{Roster: *k.roster, SetCalls: k.calls, LastSet: k.lastSet, Silent: k.silent}
			r.Known, size = known, 0
			parts = append(parts, r)
		}
		known.Tensors = append(known.Tensors, d.tensor)
		known.Placed = append(known.Placed, d.placed)
	}
	return parts
}

// budget is how many bytes of tensors go into one message; the rest is for the roster and the sets.
const budget = limits.MaxControl / 2

// sizeOf bounds the size of a tensor and its placement in JSON: numbers by their longest
// form, the name as if every byte had to be escaped.
func sizeOf(t *wire.Tensor) int {
	return 512 + 6*len(t.Name) + 21*len(t.Shape) + 6*len(t.Ranks) + (11+6)*len(t.Parts)
}

// batch is how many of the tensors go into one message.
func batch(tensors []wire.Tensor) (n int, err error) {
	size := 0
	for n < len(tensors) {
		t := &tensors[n]
		more := sizeOf(t)
		if more > limits.MaxControl {
			return 0, fmt.Errorf("tensor %q: %d partitions of %d ranks do not fit in one message; make the partitions larger",
				t.Name, len(t.Parts), len(t.Ranks))
		}
		if size += more; n > 0 && size > budget {
			break
		}
		n++
	}
	return n, nil
}
