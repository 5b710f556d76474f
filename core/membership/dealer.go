package membership

import (
	"maps"
	"slices"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/invariant"
)

// Dealer places the keys of an epoch on its servers by the epoch's policy. Keys that the epoch already has count as if
// it had placed them.
type Dealer struct {
	epoch  *Epoch
	policy placement.Policy
	placer placement.Placer
	homes  map[Name]*home
}

// home is the server of partition 0 of all tensors of a name.
type home struct {
	server  int
	tensors int
}

// load is partitions to deal. The first of them goes to the home of the tensor's name, or decides where that is,
// if first is set.
type load struct {
	number uint32
	parts  []uint32
	name   Name
	first  bool
}

// NewDealer makes the dealer of an epoch.
func NewDealer(e *Epoch) (*Dealer, error) {
	policy, err := placement.Parse(e.Policy)
	if err != nil {
		return nil, err
	}
	placer, err := policy.Over(e.Weights())
	if err != nil {
		return nil, err
	}
	d := &Dealer{epoch: e, policy: policy, placer: placer, homes: map[Name]*home{}}
	for _, t := range e.Keys.all() {
		d.Learn(t)
	}
	return d, nil
}

// Place finds servers for new tensors, together, and adds them to the epoch's keys. Partition 0 of a known name
// is placed on its home server; the first tensor of a new name decides which server that is. Tensors that come with
// servers (Near) keep these for their other partitions.
func (d *Dealer) Place(fresh []*Tensor) {
	var near, dealt []*Tensor
	for _, t := range fresh {
		if t.Servers != nil {
			near = append(near, t)
		} else {
			dealt = append(dealt, t)
		}
	}
	for i, servers := range d.deal(each.Of(dealt, func(t *Tensor) load { return load{t.Number, t.Parts, t.Name, true} })) {
		dealt[i].Servers = servers
		d.hold(dealt[i])
	}
	for _, t := range near {
		t.Near = true
		if h := d.homes[t.Name]; h != nil {
			t.Servers[0] = h.server
		}
		d.Learn(t)
	}
}

// Learn adds a tensor that was placed elsewhere: before the scheduler was restarted, or in an earlier epoch.
func (d *Dealer) Learn(t *Tensor) {
	d.placer.Add(t.Parts, t.Servers)
	d.hold(t)
}

// Remove removes a tensor and subtracts its bytes from the load of its servers.
func (d *Dealer) Remove(number uint32) {
	t := d.epoch.Keys.Of(number)
	if t == nil {
		return
	}
	d.placer.Remove(t.Parts, t.Servers)
	if h := d.homes[t.Name]; h.tensors > 1 {
		h.tensors--
	} else {
		delete(d.homes, t.Name)
	}
	d.epoch.Keys.Remove(number)
}

// hold adds a tensor whose bytes the placer has counted.
func (d *Dealer) hold(t *Tensor) {
	h := d.homes[t.Name]
	if h == nil {
		h = &home{server: t.Servers[0]}
		d.homes[t.Name] = h
	}
	h.tensors++
	d.epoch.Keys.Put(t)
}

// deal finds servers for partitions: first for those whose home server does not depend on another of them, then for the rest.
func (d *Dealer) deal(loads []load) [][]int {
	servers := make([][]int, len(loads))
	deciding := map[Name]int{} // which load decides the home of a name
	place := func(these []int, home func(*load) int) {
		all := each.Of(these, func(i int) placement.Load {
			return placement.Load{Number: loads[i].number, Parts: loads[i].parts, Home: home(&loads[i])}
		})
		for j, s := range d.placer.Place(all) {
			servers[these[j]] = s
		}
	}
	var now, later []int
	for i := range loads {
		_, again := deciding[loads[i].name]
		if again && loads[i].first {
			later = append(later, i)
			continue
		}
		if loads[i].first {
			deciding[loads[i].name] = i
		}
		now = append(now, i)
	}
	place(now, func(l *load) int {
		if h := d.homes[l.name]; h != nil && l.first {
			return h.server
		}
		return placement.Free
	})
	place(later, func(l *load) int { return servers[deciding[l.name]][0] })
	return servers
}

// inherit copies the keys of the epoch before. Those whose server is no longer live are placed again: in an elastic job on their heirs,
// which every node finds by itself; where the servers or what is known of them have changed, a policy that remaps decides on all keys.
func (e *Epoch) inherit(before *Epoch, c Change) error {
	d, err := NewDealer(e)
	if err != nil {
		return err
	}
	stays := func(s int) bool {
		return e.Servers[s].State == Live && e.Servers[s].Incarnation == before.Servers[s].Incarnation
	}
	switch {
	case e.Elastic && c.Remap:
		err = d.move(each.Of(before.Keys.all(), e.Inherited), c)
	case e.Elastic:
		for _, t := range before.Keys.all() {
			d.Learn(e.Inherited(t))
		}
	case d.policy.Remaps() && (c.Profiles != nil || !maps.Equal(before.live(), e.live())):
		err = d.remap(before.Keys.all(), c, stays)
	default:
		d.replace(before, stays)
	}
	if invariant.On && err == nil {
		e.checkKeys(before)
	}
	return err
}

// replace places the partitions again whose server does not stay.
func (d *Dealer) replace(before *Epoch, stays func(int) bool) {
	var orphans []*Tensor
	var lack [][]int // the partitions of each that have no server
	var loads []load
	for _, t := range before.Keys.all() {
		var parts []int
		l := load{number: t.Number, name: t.Name}
		for part, s := range t.Servers {
			if !stays(s) {
				parts, l.parts = append(parts, part), append(l.parts, t.Parts[part])
			}
		}
		if len(parts) == 0 {
			d.Learn(t)
			continue
		}
		l.first = parts[0] == 0
		d.keep(t, parts)
		orphans, lack, loads = append(orphans, t), append(lack, parts), append(loads, l)
	}
	for i, servers := range d.deal(loads) {
		t := *orphans[i]
		t.Servers = slices.Clone(t.Servers)
		for j, part := range lack[i] {
			t.Servers[part] = servers[j]
		}
		d.hold(&t)
	}
}

// keep counts the partitions of a tensor that keep their server: all but those listed.
func (d *Dealer) keep(t *Tensor, but []int) {
	var parts []uint32
	var servers []int
	for part, s := range t.Servers {
		if !slices.Contains(but, part) {
			parts, servers = append(parts, t.Parts[part]), append(servers, s)
		}
	}
	d.placer.Add(parts, servers)
}

// checkKeys checks the second invariant of Epoch, and that no key of the epoch before is missing.
func (e *Epoch) checkKeys(before *Epoch) {
	invariant.Check(e.Keys.Len() == before.Keys.Len(), "2: %d tensors are %d in epoch %d", before.Keys.Len(), e.Keys.Len(), e.Number)
	for _, t := range e.Keys.all() {
		for part, s := range t.Servers {
			invariant.Check(e.Servers[s].State == Live, "2: partition %d of %q is on server %d, which is not live", part, t.Name.Name, s)
		}
		invariant.Check(len(t.Servers) == len(t.Parts), "2: %q has %d partitions on %d servers", t.Name.Name, len(t.Parts), len(t.Servers))
	}
}
