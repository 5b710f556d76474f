package worker

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/limits"
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
// Every rank takes its own state, and sets it, at the same place in the program. (The bases of held values are no
// more than what a rank was sent, and are in no state. When all ranks have joined, everybody begins anew.)
//
// Residuals are pieces of whole tensors, whatever partitions those are cut into, and so are carried to a job with
// other partitions, servers or ranks. What was in the state of a rank that sets none is dropped: it begins at zero.
//
// A state's bytes are stateMagic, then for each tensor, all numbers little-endian:
//
//	uint32 process set, uint32 length and name, uint32 length and signature, uint64 iterations,
//	uint64 length and the rank's residual, uint32 pieces, each uint64 first element, uint64 length and the piece
//
// Residuals are float32 in the machine's byte order. The rank's own is as many whole tensors as its codec keeps, or
// nothing for zeros.
const stateMagic = "PLS2"

// stateID tells whose state it is.
type stateID struct {
	nameID
	signature string
}

// saved is what a state has of one tensor.
type saved struct {
	iterations uint64
	residual   []byte
	answers    []piece
}

// piece is a part of a tensor that servers keep: float32 elements.
type piece struct {
	first    int // element
	elements []byte
}

var errState = errors.New("this is no state of coded tensors")

// keeper is the member of a tensor's process set whose state has the server's residual of a partition. Of a
// reducescatter it is the one that gets the rows: the others do not know when an iteration is
// closed. offset is that of the partition, in bytes.
func keeper(t *wire.Tensor, part int, offset int64) int {
	n := len(t.Ranks)
	if t.Kind != units.Reducescatter {
		return int((codec.KeyOf(t.ProcessSet, t.Name, 0) + uint64(part)) % uint64(n))
	}
	row := int64(t.DType.Size())
	for _, d := range t.Shape[1:] {
		row *= d
	}
	for i := range n {
		if _, to := scatterRows(t.Shape[0], n, i); offset < to*row {
			return i
		}
	}
	return n - 1 // an empty one
}

// stateEntry is one tensor of a state that is being written.
type stateEntry struct {
	stateID
	d    *declaration // nil for one that is not used yet, of which the state is what was set
	kept *saved
	own  int   // bytes of the rank's own residual
	mine []int // partitions of which the servers' residuals are in it
}

func (s *stateEntry) bytes() int {
	n := 4 + 4 + len(s.name) + 4 + len(s.signature) + 8 + 8 + s.own + 4
	if s.d == nil {
		for _, p := range s.kept.answers {
			n += 16 + len(p.elements)
		}
	}
	for _, i := range s.mine {
		n += 16 + s.d.coding.answerBytes(i)
	}
	return n
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
			ops = append(ops, o)
		}
		if b, tasks = entries[i].append(b, o); o != nil {
			asked = append(asked, tasks)
		}
	}
	e.mu.Unlock()
	return len(b), e.fetch(ops, asked)
}

// stateEntries are the tensors that have a state, in the order of their names. Callers hold mu.
func (e *Engine) stateEntries() ([]stateEntry, error) {
	if e.broken != nil {
		return nil, e.broken
	}
	var entries []stateEntry
	used := map[stateID]struct{}{}
	for id, n := range e.names {
		for _, d := range n.decls {
			if d.coding == nil || d.unnamed {
				continue
			}
			if n.InFlight() > 0 { // looked at first: the encoder may be at its residual
				return nil, fmt.Errorf("%w: %q is in flight on rank %d; synchronise it before its state is taken", ErrInvalid, id.name, e.cfg.Rank)
			}
			s := stateEntry{stateID: stateID{id, d.t.Signature()}, d: d}
			if d.coding.used() {
				s.own = d.coding.stateBytes()
			}
			for i := range d.t.Parts {
				if d.coding.answerBytes(i) > 0 && d.t.Ranks[keeper(&d.t, i, d.offsets[i])] == e.cfg.Rank {
					s.mine = append(s.mine, i)
				}
			}
			used[s.stateID] = struct{}{}
			entries = append(entries, s)
		}
	}
	for id, k := range e.unclaimed { // what has been set and is still to be used
		if _, ok := used[id]; !ok {
			entries = append(entries, stateEntry{stateID: id, kept: k, own: len(k.residual)})
		}
	}
	slices.SortFunc(entries, func(a, b stateEntry) int {
		return cmp.Or(cmp.Compare(a.set, b.set), cmp.Compare(a.name, b.name), cmp.Compare(a.signature, b.signature))
	})
	return entries, nil
}

// append writes an entry, but for the servers' part: that is for the tasks to read. Callers hold mu.
func (s *stateEntry) append(b []byte, o *operation) (_ []byte, tasks []*task) {
	le := binary.LittleEndian
	b = le.AppendUint32(b, s.set)
	b = append(le.AppendUint32(b, uint32(len(s.name))), s.name...)
	b = append(le.AppendUint32(b, uint32(len(s.signature))), s.signature...)
	if s.d == nil {
		b = le.AppendUint64(b, s.kept.iterations)
		b = append(le.AppendUint64(b, uint64(s.own)), s.kept.residual...)
		b = le.AppendUint32(b, uint32(len(s.kept.answers)))
		for _, p := range s.kept.answers {
			b = le.AppendUint64(b, uint64(p.first))
			b = append(le.AppendUint64(b, uint64(len(p.elements))), p.elements...)
		}
		return b, nil
	}
	k := s.d.coding
	b = le.AppendUint64(b, s.d.before+s.d.next)
	b = le.AppendUint64(b, uint64(s.own))
	b = b[:len(b)+s.own]
	if s.own > 0 {
		k.save(b[len(b)-s.own:])
	}
	b = le.AppendUint32(b, uint32(len(s.mine)))
	for _, i := range s.mine {
		b = le.AppendUint64(b, uint64(s.d.offsets[i])/uint64(k.dtype.Size()))
		n := k.answerBytes(i)
		b = le.AppendUint64(b, uint64(n))
		b = b[:len(b)+n]
		out := b[len(b)-n:]
		clear(out)
		tasks = append(tasks, &task{o: o, h: o.header(wire.TypeState, i, units.Float32), server: s.d.placed.Servers[i], out: out, answer: true})
	}
	return b, tasks
}

// asking makes an operation that reads servers' residuals: while it is in flight, nothing else of the name begins.
// Callers hold mu.
func (e *Engine) asking(s *stateEntry) *operation {
	n := e.names[s.nameID]
	op := Op{Kind: s.d.t.Kind, Name: s.name, Set: wire.ProcessSet{ID: s.set, Ranks: s.d.t.Ranks}}
	o := &operation{Op: op, e: e, n: n, d: s.d, iteration: s.d.next, epoch: e.epoch().Number}
	o.seq = n.Beside(o, s.d)
	e.inflight[o] = struct{}{}
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
			for i, o := range ops { // those that are over take no notice
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
		name := fmt.Sprintf("server %d on this rank", t.server)
		if p := e.peers[t.server]; p != nil {
			name = p.String()
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// SetState takes in what State wrote; what it does not name starts at zero. Tensors that are in use are declared
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
	var over []wire.Header
	for id, n := range e.names {
		var stay []*declaration
		for _, d := range n.decls {
			switch {
			case d.coding != nil && d.t.Kind != units.Accumulate:
				over = append(over, wire.Header{Type: wire.TypeCancel, Flags: wire.FlagDeclare, Epoch: e.epoch().Number, Rank: uint16(e.cfg.Rank), Tensor: d.t.ID, Iteration: d.next, Seq: n.Next()})
				e.withdraw(d)
				continue
			case d.coding != nil:
				s := stateID{id, d.t.Signature()}
				d.take(all[s])
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
	for _, h := range over { // the servers' residuals go
		e.cancelAll(h)
	}
	return nil
}

// checkState finds why a state cannot be set. Callers hold mu.
func (e *Engine) checkState(all map[stateID]*saved) error {
	for id, n := range e.names {
		for _, d := range n.decls {
			if d.coding == nil {
				continue
			}
			if n.InFlight() > 0 {
				return fmt.Errorf("%w: %q is in flight on rank %d; synchronise it before its state is set", ErrInvalid, id.name, e.cfg.Rank)
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

// clone is a copy in the engine's memory: the caller's stays the caller's.
func (k *saved) clone() *saved {
	c := &saved{iterations: k.iterations, residual: slices.Clone(k.residual)}
	for _, p := range k.answers {
		c.answers = append(c.answers, piece{p.first, slices.Clone(p.elements)})
	}
	return c
}

// parseState reads a state. What it gives lies in b.
func parseState(b []byte) (map[stateID]*saved, error) {
	if len(b) < len(stateMagic) || string(b[:len(stateMagic)]) != stateMagic {
		return nil, errState
	}
	r := stateReader{b: b[len(stateMagic):]}
	all := map[stateID]*saved{}
	for len(r.b) > 0 && !r.bad {
		var s stateID
		s.set = uint32(r.number(4))
		s.name = string(r.cut(r.number(4), limits.MaxName))
		s.signature = string(r.cut(r.number(4), limits.MaxControl))
		k := &saved{iterations: r.number(8)}
		k.residual = r.cut(r.number(8), 4*limits.MaxTensor)
		for range r.number(4) {
			first := r.number(8)
			elements := r.cut(r.number(8), 4*limits.MaxTensor)
			if r.bad = r.bad || first > limits.MaxTensor || len(elements)%4 > 0; r.bad {
				break
			}
			k.answers = append(k.answers, piece{int(first), elements})
		}
		all[s] = k
	}
	if r.bad {
		return nil, errState
	}
	return all, nil
}

// stateReader cuts a state into its fields. After one that is not there or too long all are empty.
type stateReader struct {
	b   []byte
	bad bool
}

func (r *stateReader) cut(n, most uint64) []byte {
	if r.bad || n > most || n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	piece := r.b[:n]
	r.b = r.b[n:]
	return piece
}

// number reads one of so many bytes.
func (r *stateReader) number(bytes uint64) uint64 {
	var b [8]byte
	copy(b[:], r.cut(bytes, bytes))
	return binary.LittleEndian.Uint64(b[:])
}

// restore gives a declaration what SetState had for it. Callers hold mu.
func (e *Engine) restore(id nameID, d *declaration) {
	s := stateID{id, d.t.Signature()}
	k := e.unclaimed[s]
	if k == nil {
		return
	}
	delete(e.unclaimed, s)
	if err := d.fits(k); err != nil {
		e.cfg.Log.Warn(err.Error() + ": it is dropped, and everything of the tensor starts at zero")
		return
	}
	d.take(k)
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

// take makes it the rank's own part of the declaration's state; nothing for a beginning.
func (d *declaration) take(k *saved) {
	if k == nil {
		k = &saved{}
	}
	d.before = k.iterations - d.next // where it goes below zero, the sum comes out right
	d.coding.load(k.residual)
}

// had is what servers are told of the iterations before the declaration.
func (d *declaration) had() uint32 {
	if d.coding == nil {
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
				tasks = append(tasks, &task{o: o, h: h, server: o.d.placed.Servers[i], in: in, answer: true})
			}
			first = end
		}
	}
	o.d.pieces = nil
	return tasks
}

// answerBytes is the size of the residual that the server of a partition keeps. Differences of held values have none.
func (k *coding) answerBytes(part int) int {
	if k.held {
		return 0
	}
	return k.answers.ResidualBytes(k.parts[part].elements)
}

// used reports whether any partition has a residual.
func (k *coding) used() bool {
	return slices.ContainsFunc(k.parts, func(p codedPart) bool { return len(p.residual) > 0 })
}

// stateBytes is the size of the residuals of all partitions.
func (k *coding) stateBytes() int {
	n := 0
	for i := range k.parts {
		n += k.codec.ResidualBytes(k.parts[i].elements)
	}
	return n
}

// save writes the residuals to b: of a codec that keeps several tensors, one behind the other.
func (k *coding) save(b []byte) {
	clear(b)
	k.each(b, func(whole, part []byte) { copy(whole, part) })
}

// load is the way back; nothing for zeros.
func (k *coding) load(b []byte) {
	for i := range k.parts {
		k.parts[i].residual = nil
		if len(b) > 0 {
			k.parts[i].residual = make([]byte, k.codec.ResidualBytes(k.parts[i].elements))
		}
	}
	if len(b) > 0 {
		k.each(b, func(whole, part []byte) { copy(part, whole) })
	}
}

// each calls f with the pieces of b and of partitions' residuals that belong together.
func (k *coding) each(b []byte, f func(whole, part []byte)) {
	tensors := k.codec.ResidualBytes(1) / 4
	for t := range tensors {
		for i := range k.parts {
			p := &k.parts[i]
			if size := 4 * p.elements; len(p.residual) > 0 {
				f(b[:size], p.residual[t*size:(t+1)*size])
			}
			b = b[4*p.elements:]
		}
	}
}
