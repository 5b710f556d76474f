package scheduler

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// tensors are the declarations of a round. The first rank to declare a tensor decides its number and
// where it lies; all others get the same answer.
type tensors struct {
	placed map[tensorKey]wire.Placed
	names  map[membership.Name]*named
	last   uint32 // greatest number in use
	dealer *membership.Dealer
}

// tensorKey is everything by which two declarations are the same tensor.
type tensorKey struct {
	membership.Name
	signature  string
	generation uint64
	parts      string // their bytes, four each
}

// named is the state of one name.
type named struct {
	generation uint64
	keys       []tensorKey
}

func newTensors(d *membership.Dealer) tensors {
	return tensors{placed: map[tensorKey]wire.Placed{}, names: map[membership.Name]*named{}, dealer: d}
}

func nameOf(t *wire.Tensor) membership.Name { return membership.Name{Set: t.ProcessSet, Name: t.Name} }

// memberOf is a tensor as a remap moves its keys. Those of broadcasts stay: parameters travel once, and a server that comes is to have its share of what travels in each step.
func memberOf(t *wire.Tensor, p wire.Placed) *membership.Tensor {
	return &membership.Tensor{Number: p.ID, Name: nameOf(t), Parts: t.Parts, Servers: p.Servers, Fixed: !moves(t) || t.Kind == units.Broadcast}
}

// moves reports whether the keys of a tensor can go on at another server while their own lives: those of held values, and of sums that every rank gets, as broadcasts
// and allgathers are in an elastic job. Of all others the server has what nobody else has.
func moves(t *wire.Tensor) bool {
	switch t.Kind {
	case units.Accumulate, units.Broadcast, units.Allgather:
		return true
	case units.Allreduce, units.Reducescatter:
	default:
		return false
	}
	model, err := condition.Parse(t.Sync.Model)
	return t.Sync.Model == "" || err == nil && model.Whole()
}

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
	before := len(r.tensors.placed)
	placed, err := r.tensors.declare(c.Declare)
	if err != nil {
		m.refuse(l, c.ID, err.Error())
		return
	}
	if now := len(r.tensors.placed); before < limits.ManyTensors && now >= limits.ManyTensors {
		m.warn("the job has declared %d tensors, the latest %q: each new name, shape, type or scale factor needs memory on every node until the end, and %d are the limit; use the same ones in every iteration",
			now, c.Declare[len(c.Declare)-1].Name, limits.MaxTensors)
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
	case !ok && t.ProcessSet < r.sets.next:
		return fmt.Sprintf("tensor %q: process set %d was removed; synchronise a set's operations before removing it", t.Name, t.ProcessSet)
	case !ok:
		return fmt.Sprintf("tensor %q: there is no process set %d", t.Name, t.ProcessSet)
	case !slices.Equal(ranks, t.Ranks):
		return fmt.Sprintf("tensor %q: process set %d has %s, the declaration says %s", t.Name, t.ProcessSet, ranksOf(ranks), ranksOf(t.Ranks))
	}
	return ""
}

// declare numbers and places the tensors that are new, together, and returns the placement of each.
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
	if uint64(t.last)+uint64(len(fresh)) > limits.MaxNumber {
		return nil, fmt.Errorf("tensor %q: the job has used up the numbers of tensors, %d; use the same names in every iteration", fresh[0].Name, limits.MaxNumber)
	}
	placed := make([]wire.Placed, len(all))
	for i, k := range keys { // before a newer generation in the same batch replaces what is known
		placed[i] = t.placed[k]
	}
	answers := t.place(fresh)
	for i, k := range keys {
		if p, ok := answers[k]; ok {
			placed[i] = p
		}
	}
	return placed, nil
}

// place numbers, places and adds new tensors.
func (t *tensors) place(fresh []wire.Tensor) map[tensorKey]wire.Placed {
	dealt := make([]*membership.Tensor, len(fresh))
	for i := range fresh {
		f := &fresh[i]
		dealt[i] = memberOf(f, wire.Placed{ID: t.last + 1 + uint32(i)})
		x := membership.Exchange{Kind: f.Kind, Ranks: f.Ranks, Root: f.Root}
		if len(f.Shape) > 0 {
			x.Rows = f.Shape[0]
		}
		dealt[i].Servers = t.dealer.Near(x, dealt[i].Number, f.Parts)
	}
	t.dealer.Place(dealt)
	answers := make(map[tensorKey]wire.Placed, len(fresh))
	for i := range fresh {
		p := wire.Placed{ID: dealt[i].Number, Servers: dealt[i].Servers}
		t.add(&fresh[i], p)
		answers[keyOf(&fresh[i])] = p
	}
	return answers
}

// add adds a tensor. A newer generation of a name drops the older ones, but for the one before: the rank whose operation has failed goes on, while others are yet to
// declare what it has left, and bring it to those who have declared that already. After a join of all ranks nobody is behind.
func (t *tensors) add(f *wire.Tensor, p wire.Placed) {
	k := keyOf(f)
	n := t.names[k.Name]
	if n == nil {
		n = &named{}
		t.names[k.Name] = n
	}
	if f.Generation > n.generation {
		n.keys = slices.DeleteFunc(n.keys, func(old tensorKey) bool {
			over := old.generation < n.generation || !agreement.SameJoin(old.generation, f.Generation)
			if over {
				t.drop(old)
			}
			return over
		})
		n.generation = f.Generation
	}
	n.keys = append(n.keys, k)
	t.placed[k] = p
	t.last = max(t.last, p.ID)
}

// drop removes a tensor and its bytes from the servers.
func (t *tensors) drop(k tensorKey) {
	t.dealer.Remove(t.placed[k].ID)
	delete(t.placed, k)
}

// dropSet drops the tensors of a process set that was removed.
func (t *tensors) dropSet(set uint32) {
	maps.DeleteFunc(t.names, func(k membership.Name, n *named) bool {
		if k.Set == set {
			for _, key := range n.keys {
				t.drop(key)
			}
		}
		return k.Set == set
	})
}

// learn adds what a worker knows of a restored round. What another worker sent before has precedence.
func (m *Machine) learn(r *round, known *wire.Known) {
	r.sets.learn(known, len(r.workers))
	t := &r.tensors
	for i := range min(len(known.Tensors), len(known.Placed)) {
		f, p := &known.Tensors[i], known.Placed[i]
		outside := func(s int) bool { return s < 0 || s >= len(r.epoch.Servers) }
		if f.Check() != nil || p.ID == 0 || p.ID > limits.MaxNumber || len(p.Servers) != len(f.Parts) || slices.ContainsFunc(p.Servers, outside) {
			m.warn("a worker sent an invalid record of tensor %q (number %d): ignored", f.Name, p.ID)
			continue
		}
		k := keyOf(f)
		if _, there := t.placed[k]; there || len(t.placed) >= limits.MaxTensors {
			continue
		}
		t.last = max(t.last, p.ID)
		if n := t.names[k.Name]; n != nil && n.generation > f.Generation && !agreement.SameJoin(n.generation, f.Generation) {
			continue
		}
		inherited := r.epoch.Inherited(memberOf(f, p))
		p.Servers = inherited.Servers
		t.dealer.Learn(inherited)
		t.add(f, p)
	}
}
