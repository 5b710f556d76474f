package worker

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// State is what coded tensors need beside the model to go on from a checkpoint as if nothing had happened. Of each,
// a rank's state has
//
//   - how many iterations it has had: warm-ups and random numbers follow from that;
//   - the rank's own residual: what its messages lacked so far;
//   - a share of the residuals that servers keep of answers (keeper), whatever servers they lie on, so that all ranks'
//     states together have each of them once.
//
// Every rank saves its own state, and sets it, at the same place in the program. (Reference copies of held values are no
// more than what a rank was sent, and are in no state. When all ranks have joined, everybody begins anew.)
//
// Residuals are pieces of whole tensors, whatever partitions those are cut into, and so are carried to a job with
// other partitions, servers or ranks. What was in the state of a rank that sets none is dropped: it begins at zero.
//
// statebytes.go has the bytes of a state.

// stateID tells whose state it is.
type stateID struct {
	nameID
	signature string
}

// keeper is the member of a tensor's process set whose state has the server's residual of a partition, which begins at offset. A server
// that leaves finds it too (sums.Room.Leave).
func keeper(t *wire.Tensor, part int, offset int64) int {
	return placement.Keeper(t.Kind, codec.KeyOf(t.ProcessSet, t.Name, 0), t.Shape, t.DType.Size(), len(t.Ranks), part, offset)
}

// State writes the state to dst and returns its length. Where dst is shorter, nothing is written. It waits for the
// servers' part. No operation on a coded tensor may be in flight.
func (e *Engine) State(dst []byte) (int, error) {
	e.mu.Lock()
	entries, err := e.stateEntries()
	size := len(stateMagic)
	for i := range entries {
		size += entries[i].bytes()
	}
	if err != nil || len(dst) < size {
		e.mu.Unlock()
		return size, err
	}
	b := dst[:copy(dst, stateMagic)]
	var ops []*operation
	var asked [][]*task
	for i := range entries {
		var tasks []*task
		var o *operation
		if s := &entries[i]; len(s.mine) > 0 {
			o = e.asking(s)
			o.e = e
			e.untold.Add(1)
			ops = append(ops, o)
		}
		if b, tasks = entries[i].append(b, o); o != nil {
			asked = append(asked, tasks)
		}
	}
	e.mu.Unlock()
	return len(b), e.fetch(ops, asked)
}

// stateEntries are the tensors that have a state, in the order of their names.
func (b *book) stateEntries() ([]stateEntry, error) {
	if b.broken != nil {
		return nil, b.broken
	}
	var entries []stateEntry
	used := map[stateID]struct{}{}
	for id, n := range b.names {
		for _, d := range n.decls {
			if d.coding == nil || d.unnamed {
				continue
			}
			if n.InFlight() > 0 { // looked at first: the encoder may be at its residual
				return nil, fmt.Errorf("%w: %q is in flight on rank %d; synchronise it before its state is taken", ErrInvalid, id.name, b.cfg.Rank)
			}
			s := stateEntry{stateID: stateID{id, d.t.Signature()}, d: d}
			if d.coding.used() {
				s.own = d.coding.stateBytes()
			}
			for i := range d.t.Parts {
				if d.coding.answerBytes(i) > 0 && d.t.Ranks[keeper(&d.t, i, d.offsets[i])] == b.cfg.Rank {
					s.mine = append(s.mine, i)
				}
			}
			used[s.stateID] = struct{}{}
			entries = append(entries, s)
		}
	}
	for id, k := range b.unclaimed { // what has been set and is still to be used
		if _, ok := used[id]; !ok {
			entries = append(entries, stateEntry{stateID: id, kept: k, own: len(k.residual)})
		}
	}
	slices.SortFunc(entries, func(a, b stateEntry) int {
		return cmp.Or(cmp.Compare(a.set, b.set), cmp.Compare(a.name, b.name), cmp.Compare(a.signature, b.signature))
	})
	return entries, nil
}

// asking makes an operation that reads servers' residuals: while it is in flight, nothing else of the name begins.
func (b *book) asking(s *stateEntry) *operation {
	n := b.names[s.nameID]
	op := Op{Kind: s.d.t.Kind, Name: s.name, Set: wire.ProcessSet{ID: s.set, Ranks: s.d.t.Ranks}}
	o := &operation{Op: op, n: n, d: s.d, iteration: s.d.next, epoch: b.epoch().Joins, beside: true}
	o.mu.Place(levelWorker, "operation")
	o.seq = n.Beside(o, s.d)
	b.inflight[o] = struct{}{}
	return o
}

// fetch runs operations that read servers' residuals, and waits for all of them.
func (e *Engine) fetch(ops []*operation, tasks [][]*task) error {
	done := make(chan error, len(ops))
	for i, o := range ops {
		o.Done = func(_ Output, err error) { done <- err }
		o.run(tasks[i], nil)
	}
	patience := time.NewTimer(e.cfg.DeclareTimeout)
	defer patience.Stop()
	var failure error
	for left := len(ops); left > 0; {
		select {
		case err := <-done:
			left--
			failure = cmp.Or(failure, err)
		case <-patience.C:
			for i, o := range ops { // those that are over ignore it
				o.giveUp(fmt.Errorf("%w: rank %d did not get the residual of %q from %s within %v", ErrStall, e.cfg.Rank, o.name(), e.serversOf(tasks[i]), e.cfg.DeclareTimeout))
			}
		}
	}
	return failure
}

// serversOf names the servers that tasks go to.
func (e *Engine) serversOf(tasks []*task) string {
	var names []string
	for _, t := range tasks {
		name := e.wayTo(t.at()).String()
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// SetState restores what State wrote; what it does not name starts at zero. Tensors that are in use are declared
// anew, as every rank does; held values stay, and only their residuals change. Nothing changes where there is an error.
func (e *Engine) SetState(state []byte) error {
	all, err := parseState(state)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	e.mu.Lock()
	if err := e.checkState(all); err != nil {
		e.mu.Unlock()
		return err
	}
	over := map[*declaration]wire.Header{}
	for id, n := range e.names {
		var stay []*declaration
		for _, d := range n.decls {
			switch {
			case d.coding != nil && d.t.Kind != units.Accumulate && d.state == declareDone:
				over[d] = wire.Header{Type: wire.TypeCancel, Flags: wire.FlagDeclare, Epoch: e.epoch().Joins, Rank: uint16(e.cfg.Rank), Tensor: d.t.ID, Iteration: d.next, Seq: n.Next()}
				e.withdraw(d)
				continue
			case d.coding != nil:
				s := stateID{id, d.t.Signature()}
				d.load(all[s])
				delete(all, s)
			}
			stay = append(stay, d)
		}
		if len(stay) < len(n.decls) {
			n.Anew(n.Next() - 1)
			n.decls, n.last = stay, nil
		}
	}
	e.unclaimed = map[stateID]*saved{}
	for s, k := range all {
		e.unclaimed[s] = k.clone()
	}
	e.mu.Unlock()
	for d, h := range over { // the servers' residuals go
		e.each(func(w way) { w.cancel(d, h) })
	}
	return nil
}

// checkState finds why a state cannot be set.
func (b *book) checkState(all map[stateID]*saved) error {
	for id, n := range b.names {
		for _, d := range n.decls {
			if d.coding == nil {
				continue
			}
			if n.InFlight() > 0 {
				return fmt.Errorf("%w: %q is in flight on rank %d; synchronise it before its state is set", ErrInvalid, id.name, b.cfg.Rank)
			}
			if k := all[stateID{id, d.t.Signature()}]; k != nil {
				if err := d.fits(k); err != nil {
					return fmt.Errorf("%w: %w", ErrInvalid, err)
				}
			}
		}
	}
	return nil
}

// restore gives a declaration what SetState had for it.
func (b *book) restore(id nameID, d *declaration) {
	s := stateID{id, d.t.Signature()}
	k := b.unclaimed[s]
	if k == nil {
		return
	}
	delete(b.unclaimed, s)
	if err := d.fits(k); err != nil {
		b.cfg.Log.Warn(err.Error() + ": it is dropped, and everything of the tensor starts at zero")
		return
	}
	d.load(k)
	d.pieces = k.answers
}

// fits checks that what a state has of a tensor is of its size.
func (d *declaration) fits(k *saved) error {
	if n := d.coding.stateBytes(); len(k.residual) > 0 && len(k.residual) != n {
		return fmt.Errorf("the state has a residual of %d bytes of %q, want %d", len(k.residual), d.t.Name, n)
	}
	all := 0
	for i := range d.coding.parts {
		all += d.coding.answerBytes(i)
	}
	for _, p := range k.answers {
		if 4*p.first+len(p.elements) > all {
			return fmt.Errorf("the state has a servers' residual of %q from element %d on with %d bytes, where all has %d", d.t.Name, p.first, len(p.elements), all)
		}
	}
	return nil
}

// load makes it the rank's own part of the declaration's state; nothing for a beginning.
func (d *declaration) load(k *saved) {
	if k == nil {
		k = &saved{}
	}
	d.before = k.iterations - d.next // where it goes below zero, the sum comes out right
	d.coding.load(k.residual)
}

// had is the number of iterations before the declaration, as it is sent to servers; 0 where an earlier state than that has been loaded.
func (d *declaration) had() uint32 {
	if d.coding == nil || int64(d.before) < 0 {
		return 0
	}
	return uint32(min(d.before, math.MaxUint32))
}

// restoring are the tasks that bring the servers' residuals back, before the declaration's first operation.
func (o *operation) restoring() (tasks []*task) {
	if o.d == nil || len(o.d.pieces) == 0 { // operations without a name have none, and may be several at a time
		return nil
	}
	for _, p := range o.d.pieces {
		first := 0 // element of the partition
		for i := range o.d.coding.parts {
			end := first + o.d.coding.parts[i].elements
			from, to := max(p.first, first), min(p.first+len(p.elements)/4, end)
			if from < to {
				h := o.header(wire.TypeRestore, i, units.Float32)
				h.Offset = uint32(from - first)
				in := p.elements[4*(from-p.first) : 4*(to-p.first)]
				tasks = append(tasks, &task{o: o, h: h, server: o.d.server(i), in: in, answer: true})
			}
			first = end
		}
	}
	o.d.pieces = nil
	return tasks
}
