package scheduler

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// tensors are the declarations of a round. The first rank to declare a tensor decides its number and
// where it lies; all others get the same answer.
type tensors struct {
	placed map[tensorKey]located
	names  map[nameKey]*named
	last   uint32 // greatest number in use
	placer placement.Placer
}

type located struct {
	wire.Placed
	parts []uint32
}

// tensorKey is everything by which two declarations are the same tensor.
type tensorKey struct {
	nameKey
	signature  string
	generation uint64
	parts      string // their bytes, four each
}

type nameKey struct {
	set  uint32
	name string
}

// named is what all declarations of one name share.
type named struct {
	home       int // server of partition 0, where ranks that use the name differently are found out
	generation uint64
	keys       []tensorKey
}

func newTensors(setting string, servers []wire.Node) (tensors, error) {
	t := tensors{placed: map[tensorKey]located{}, names: map[nameKey]*named{}}
	policy, err := placement.Parse(setting)
	if err == nil {
		t.placer, err = policy.Over(shares(servers))
	}
	return t, err
}

func shares(servers []wire.Node) []float64 {
	dedicated := make([]bool, len(servers))
	for i := range servers {
		dedicated[i] = servers[i].Role == wire.RoleServer
	}
	return placement.Shares(dedicated)
}

func nameOf(t *wire.Tensor) nameKey { return nameKey{t.ProcessSet, t.Name} }

func keyOf(t *wire.Tensor) tensorKey {
	parts := make([]byte, 0, 4*len(t.Parts))
	for _, n := range t.Parts {
		parts = binary.LittleEndian.AppendUint32(parts, n)
	}
	return tensorKey{nameOf(t), t.Signature(), t.Generation, string(parts)}
}

// declare answers a worker's declarations, all or none.
func (m *Machine) declare(l *line, c *wire.Control) {
	r := l.peer.round
	for i := range c.Declare {
		if why := r.objection(&c.Declare[i]); why != "" {
			m.refuse(l, c.ID, why)
			return
		}
	}
	placed, err := r.tensors.declare(c.Declare)
	if err != nil {
		m.refuse(l, c.ID, err.Error())
		return
	}
	m.answer(l, c.ID, &wire.Control{Placed: placed})
}

// objection is why a tensor cannot be declared in the round, "" if it can.
func (r *round) objection(t *wire.Tensor) string {
	if err := t.Check(); err != nil {
		return err.Error()
	}
	ranks, ok := r.sets.byID[t.ProcessSet]
	switch {
	case !ok:
		return fmt.Sprintf("tensor %q: there is no process set %d", t.Name, t.ProcessSet)
	case !slices.Equal(ranks, t.Ranks):
		return fmt.Sprintf("tensor %q: process set %d has %s, the declaration says %s", t.Name, t.ProcessSet, ranksOf(ranks), ranksOf(t.Ranks))
	}
	return ""
}

// declare numbers and places the tensors that are new, together, and returns what is known of each.
func (t *tensors) declare(all []wire.Tensor) ([]wire.Placed, error) {
	var fresh []wire.Tensor
	keys := make([]tensorKey, len(all))
	seen := map[tensorKey]bool{}
	for i := range all {
		k := keyOf(&all[i])
		keys[i] = k
		if _, known := t.placed[k]; !known && !seen[k] {
			seen[k] = true
			fresh = append(fresh, all[i])
		}
	}
	if len(t.placed)+len(fresh) > limits.MaxTensors {
		return nil, fmt.Errorf("tensor %q: the job has declared %d tensors, the limit is %d; use the same names in every iteration",
			fresh[0].Name, len(t.placed), limits.MaxTensors)
	}
	answers := t.place(fresh)
	placed := make([]wire.Placed, len(all))
	for i, k := range keys {
		placed[i] = t.placed[k].Placed
		if p, ok := answers[k]; ok { // a newer generation in this very batch may have taken its place
			placed[i] = p
		}
	}
	return placed, nil
}

// place finds servers for new tensors and takes them in. Partition 0 of a name that is known goes home;
// where one batch brings several tensors of a new name, the first of them decides where that is.
func (t *tensors) place(fresh []wire.Tensor) map[tensorKey]wire.Placed {
	servers := make([][]int, len(fresh))
	homes := map[nameKey]int{} // of names that this batch brings: index of the first tensor
	deal := func(these []int, home func(nameKey) int) {
		loads := make([]placement.Load, len(these))
		for j, i := range these {
			loads[j] = placement.Load{Parts: fresh[i].Parts, Home: home(nameOf(&fresh[i]))}
		}
		for j, s := range t.placer.Place(loads) {
			servers[these[j]] = s
		}
	}
	var first, later []int
	for i := range fresh {
		n := nameOf(&fresh[i])
		if _, again := homes[n]; again {
			later = append(later, i)
			continue
		}
		homes[n] = i
		first = append(first, i)
	}
	deal(first, func(n nameKey) int {
		if known := t.names[n]; known != nil {
			return known.home
		}
		return placement.Free
	})
	deal(later, func(n nameKey) int { return servers[homes[n]][0] })
	answers := make(map[tensorKey]wire.Placed, len(fresh))
	for i := range fresh {
		p := wire.Placed{ID: t.last + 1, Servers: servers[i]}
		t.add(&fresh[i], p)
		answers[keyOf(&fresh[i])] = p
	}
	return answers
}

// add takes a tensor in. A newer generation of a name drops the older ones.
func (t *tensors) add(f *wire.Tensor, p wire.Placed) {
	k := keyOf(f)
	n := t.names[k.nameKey]
	if n == nil {
		n = &named{home: p.Servers[0]}
		t.names[k.nameKey] = n
	}
	if f.Generation > n.generation {
		n.generation = f.Generation
		n.keys = slices.DeleteFunc(n.keys, func(old tensorKey) bool {
			if old.generation < f.Generation {
				t.drop(old)
			}
			return old.generation < f.Generation
		})
	}
	n.keys = append(n.keys, k)
	t.placed[k] = located{p, f.Parts}
	t.last = max(t.last, p.ID)
}

// drop forgets a tensor and takes its bytes off the servers.
func (t *tensors) drop(k tensorKey) {
	p := t.placed[k]
	t.placer.Remove(p.parts, p.Servers)
	delete(t.placed, k)
}

// dropSet forgets the tensors of a process set that was removed.
func (t *tensors) dropSet(set uint32) {
	maps.DeleteFunc(t.names, func(k nameKey, n *named) bool {
		if k.set == set {
			for _, key := range n.keys {
				t.drop(key)
			}
		}
		return k.set == set
	})
}

// learn takes over what a worker knows of a restored round. What another worker said before stands.
func (m *Machine) learn(r *round, known *wire.Known) {
	r.sets.learn(known, len(r.workers))
	t := &r.tensors
	for i := range min(len(known.Tensors), len(known.Placed)) {
		f, p := &known.Tensors[i], known.Placed[i]
		outside := func(s int) bool { return s < 0 || s >= len(r.roster.Servers) }
		if f.Check() != nil || p.ID == 0 || len(p.Servers) != len(f.Parts) || slices.ContainsFunc(p.Servers, outside) {
			m.warn("a worker remembers tensor %q (number %d) in a way that cannot be: left out", f.Name, p.ID)
			continue
		}
		k := keyOf(f)
		if _, there := t.placed[k]; there || len(t.placed) >= limits.MaxTensors {
			continue
		}
		t.last = max(t.last, p.ID)
		if n := t.names[k.nameKey]; n != nil && n.generation > f.Generation {
			continue
		}
		t.placer.Add(f.Parts, p.Servers)
		t.add(f, p)
	}
}
