package worker

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

type nameID struct {
	set  uint32
	name string
}

// nameState is one name: how often it was used, and what it is declared as. Ranks must start its operations in the same
// order; the home server compares what they bring by their counts (core/agreement).
type nameState struct {
	agreement.Uses[*operation, *declaration]
	decls []*declaration // one per signature under which the name is used
	last  *declaration

	ahead int          // operations under way
	held  []*operation // that wait until fewer are; the oldest first
	spare *operation   // one that has ended, for the next use; nil for none
}

// declaration is one signature of a name.
type declaration struct {
	t       wire.Tensor
	asked   string                // codec, as the last operation named it
	cut     int                   // partition size, as the last operation of a search wanted it; 0 before
	coding  *coding               // nil for plain
	unnamed bool                  // its iterations are anybody's, and in no state
	before  uint64                // iterations before the declaration, as a state had them
	pieces  []piece               // of servers' residuals that a state had; until the first operation
	placed  *membership.Tensor    // without servers until it is declared
	moved   atomic.Pointer[[]int] // the servers, where some partitions have been moved since
	offsets []int64               // of each partition
	state   declareState
	err     error
	next    uint64       // iteration of the next operation; of a held value the next push
	waiting []*operation // until it is declared

	host     []int // ranks of this host that sum it among themselves first; nil for none
	priority int   // of its last use

	group     string // of a held value: the first of those that are stepped together; "" without supersteps
	superstep *steps // of the first
}

type declareState uint8

const (
	declareNeeded declareState = iota
	declareAsked
	declareDone
	declareFailed
)

// register counts an operation under its name and finds its declaration.
func (b *book) register(op *Op) *operation {
	if op.Kind.Message() {
		return b.registerMessage(op)
	}
	n := b.nameOf(nameID{op.Set.ID, op.name()})
	o := n.spare
	if n.spare = nil; o == nil {
		o = new(operation)
	}
	o.mu.Place(levelWorker, "operation")
	o.Op, o.n, o.epoch = *op, n, b.epoch().Joins
	before := n.Generation()
	o.seq, o.err = n.Count()
	if n.Generation() != before {
		b.declareAnew(n)
	}
	b.inflight[o] = struct{}{}
	if o.err != nil {
		o.Shape = slices.Clone(op.Shape)
		n.Begin(o.seq, o, nil)
		return o
	}
	o.d = b.declare(n, o)
	n.Begin(o.seq, o, o.d)
	o.iteration, o.d.priority = o.d.count(o), op.Priority
	if o.Shape = o.d.t.Shape; len(o.Shape) < len(op.Shape) {
		o.Shape = slices.Clone(op.Shape)
	}
	if n.ahead >= b.maxAhead() {
		n.held = append(n.held, o)
		o.deferred, o.held = true, true
		return o
	}
	n.ahead++
	o.deferred = o.d.await(o)
	return o
}

// maxAhead is how many operations of a name may be under way: in an elastic job one, because a rank keeps one result of each key.
func (b *book) maxAhead() int {
	if b.epoch().Elastic {
		return 1
	}
	return limits.MaxAhead
}

// await has an operation wait for the declaration, and reports whether it has to.
func (d *declaration) await(o *operation) bool {
	if d.state != declareNeeded && d.state != declareAsked {
		return false
	}
	d.waiting = append(d.waiting, o)
	return true
}

// stopAwaiting has an operation wait no longer for its declaration, or for those of its name before it, and reports whether it did.
func (e *Engine) stopAwaiting(o *operation) bool {
	if o.d == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	list := &o.d.waiting
	if o.held { // and stays so: it is not counted among those under way
		list = &o.n.held
	}
	i := slices.Index(*list, o)
	if i >= 0 {
		*list = slices.Delete(*list, i, i+1)
	}
	return i >= 0
}

// nameOf finds or makes the state of a name.
func (b *book) nameOf(id nameID) *nameState {
	n := b.names[id]
	if n == nil {
		n = &nameState{Uses: agreement.NewUses[*operation, *declaration](b.epoch().Joins)}
		b.names[id] = n
	}
	return n
}

// count gives an operation its iteration. A pull of a held value belongs to the push before it.
func (d *declaration) count(o *operation) uint64 {
	switch {
	case o.Kind == units.Accumulate && o.Use&units.Within != 0:
		return d.next
	case o.Kind != units.Accumulate || o.Use&units.Add != 0:
		d.next++
		return d.next - 1
	case o.Use == units.Declare:
		return 0
	case d.next == 0: // nothing was pushed that it could wait for
		o.Use = units.ReadNow | o.Use&units.Exact
		return 0
	}
	return d.next - 1
}

// declare finds the declaration of an operation's signature, or makes it.
func (b *book) declare(n *nameState, o *operation) *declaration {
	cut := b.cut(&o.Op, o.seq)
	if d := b.find(n, &o.Op, cut); d != nil {
		n.last = d
		return d
	}
	c := b.codecOf(&o.Op)
	if c != nil {
		cut = 0
	}
	d := &declaration{t: b.describe(n, o, cut), asked: o.Codec, cut: cut, group: o.Group, unnamed: !o.named(), placed: new(membership.Tensor)}
	d.offsets = offsetsOf(d.t.Parts)
	d.t.Codec = ""
	if c != nil {
		d.t.Codec = c.String()
		d.coding = newCoding(c, &d.t)
		if !d.unnamed {
			b.restore(nameID{o.Set.ID, o.name()}, d)
		}
	}
	b.sumOnHost(d)
	n.decls = append(n.decls, d)
	n.last = d
	b.undeclared = append(b.undeclared, d)
	return d
}

// find looks for the declaration of an operation's signature. Operations may name one codec by different
// texts, and be cut otherwise while a search runs.
func (b *book) find(n *nameState, op *Op, cut int) *declaration {
	if d := n.last; d != nil && d.asked == op.Codec && d.matches(op) && b.cutAlike(d, op, cut) {
		return d
	}
	for _, d := range n.decls {
		if d.matches(op) && (d.asked == op.Codec || d.t.Codec == b.codecText(op)) && b.cutAlike(d, op, cut) {
			d.asked = op.Codec
			return d
		}
	}
	return nil
}

// declarationOf finds the declaration of a tensor's number; nil where there is none.
func (b *book) declarationOf(number uint32) *declaration {
	t := b.epoch().Keys.Of(number)
	if t == nil {
		return nil
	}
	if n := b.names[nameID{t.Name.Set, t.Name.Name}]; n != nil {
		for _, d := range n.decls {
			if d.t.ID == number {
				return d
			}
		}
	}
	return nil
}

// matches reports whether an operation is another use of the declaration, provided that its codec is that.
func (d *declaration) matches(o *Op) bool {
	t, declared := &d.t, o.Declared
	declared.Codec = t.Codec
	return t.Kind == o.Kind && t.DType == o.DType && t.Op == o.ReduceOp && t.Prescale == o.Prescale && t.Postscale == o.Postscale &&
		declared == t.Declared && (t.Kind != units.Broadcast || t.Root == o.Root) && slices.Equal(t.Shape, o.commonShape())
}

// commonShape is the part of the shape that must agree on all ranks.
func (o *Op) commonShape() []int64 {
	if o.Kind == units.Allgather || o.Kind == units.Alltoall {
		return o.Shape[1:]
	}
	return o.Shape
}

// describe makes what is declared of an operation.
func (b *book) describe(n *nameState, o *operation, cut int) wire.Tensor {
	t := wire.Tensor{
		Name: o.name(), Kind: o.Kind, Op: o.ReduceOp, DType: o.DType, Shape: slices.Clone(o.commonShape()), Root: o.Root,
		ProcessSet: o.Set.ID, Ranks: o.Set.Ranks, Prescale: o.Prescale, Postscale: o.Postscale, Generation: n.Generation(), Priority: o.Priority,
		Declared: o.Declared,
	}
	if o.Kind != units.Broadcast && o.Kind != units.Accumulate {
		t.Root = 0
	}
	t.Parts = b.parts(&o.Op, cut)
	return t
}

// parts cuts the operation into partitions of a size, 0 for the job's.
func (b *book) parts(o *Op, cut int) []uint32 {
	cut = cmp.Or(cut, b.cfg.PartitionBytes)
	n := len(o.Set.Ranks)
	servers := b.epoch().Founders()                // ranks hear of a join at different moments, and have to cut alike
	policy, _ := placement.Parse(b.epoch().Policy) // one that is unknown here has no say in how tensors are cut
	size := o.DType.Size()
	bytes, err := o.bytes()
	if err != nil {
		bytes = 0 // check has refused it
	}
	switch o.Kind {
	case units.Allgather: // the sizes: one number per rank
		return append([]uint32{uint32(8 * n)}, b.secondStage(o.Kind)...)
	case units.Broadcast:
		return append(policy.Cut(uint64(bytes), size, cut, servers, nil), b.secondStage(o.Kind)...)
	case units.Alltoall: // one number per pair of ranks
		return append([]uint32{uint32(8 * n * n)}, b.secondStage(o.Kind)...)
	case units.Reducescatter:
		var cuts []int64
		for i := 1; i < n; i++ {
			from, _ := placement.Rows(o.Shape[0], n, i)
			cuts = append(cuts, from*o.rowBytes())
		}
		return policy.Cut(uint64(bytes), size, cut, servers, cuts)
	default:
		if o.ReduceOp == units.Adasum && o.Kind == units.Allreduce {
			return []uint32{uint32(bytes)}
		}
		return policy.Cut(uint64(bytes), size, cut, servers, nil)
	}
}

func offsetsOf(parts []uint32) []int64 {
	offsets := make([]int64, len(parts)+1)
	for i, n := range parts {
		offsets[i+1] = offsets[i] + int64(n)
	}
	return offsets
}

// nameFailed notes a failed operation, and says what ends with it here.
func (b *book) nameFailed(f wire.Failure, err error) agreement.Verdict[*operation] {
	n := b.nameOf(nameID{f.ProcessSet, f.Name})
	v := n.Failed(f.Generation, f.Seq, err)
	if v.Anew {
		b.declareAnew(n)
	}
	return v
}

// declareAnew has what follows under a name be declared anew.
func (b *book) declareAnew(n *nameState) {
	b.withdraw(n.decls...)
	n.decls, n.last = nil, nil
}

// withdraw forgets where declarations that are over were placed; operations under way keep their placement.
func (b *book) withdraw(decls ...*declaration) {
	for _, d := range decls {
		b.epoch().Keys.Remove(d.t.ID)
		b.kept.forget(d.t.ID)
	}
}

// started finds an operation in flight by the number of its tensor and its count; nil if there is none. It is lent.
func (e *Engine) started(tensor uint32, seq uint64) *operation {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lent++
	for o := range e.inflight {
		if o.seq == seq && o.d != nil && o.d.t.ID == tensor {
			return o
		}
	}
	return nil
}

// lend begins a loan of operations: none is used again until it is handed back.
func (e *Engine) lend() {
	e.mu.Lock()
	e.lent++
	e.mu.Unlock()
}

// handBack ends the loan of operations: those who have taken some from the book look at them no more.
func (e *Engine) handBack() {
	e.mu.Lock()
	e.lent--
	e.mu.Unlock()
}

// forget removes a finished operation from the book, for another use of its name if it may be, and starts those that were
// held for it.
func (e *Engine) forget(o *operation, again bool) {
	e.mu.Lock()
	delete(e.inflight, o)
	if o.n != nil {
		o.n.End(o.seq)
	} else {
		e.messageOver(o)
	}
	e.over.operations++
	e.over.bytes += uint64(len(o.Input))
	e.gather.ended(o)
	due := e.leaving(e.gather.due())
	if o.d != nil && !o.beside && !o.held {
		o.n.ahead--
		e.release(o.n)
	}
	if again && e.lent == 0 {
		n := o.n
		*o = operation{room: o.room, list: o.list}
		n.spare = o
	}
	j, idle := e.joining, len(e.inflight) == e.messages.inFlight
	first := len(e.released) > 0 && !e.releasing
	if first {
		e.releasing = true
	}
	e.mu.Unlock()
	if first {
		e.startReleased()
	}
	if j != nil && idle {
		j.send(e)
	}
	e.together(due, false)
}

// release lets operations of a name go that were held, as far as there is room.
func (b *book) release(n *nameState) {
	for n.ahead < b.maxAhead() && len(n.held) > 0 {
		o := n.held[0]
		n.held[0] = nil
		n.held = n.held[1:]
		o.held = false
		n.ahead++
		if !o.d.await(o) {
			b.released = append(b.released, o)
		}
	}
}

// startReleased starts the operations that were released. One that ends at once releases others: they are started here too, one
// after the other, however many there are.
func (e *Engine) startReleased() {
	for {
		e.mu.Lock()
		batch := e.released
		e.released = nil
		e.releasing = len(batch) > 0
		e.mu.Unlock()
		if len(batch) == 0 {
			return
		}
		for _, o := range batch {
			e.mu.Lock()
			err := o.d.err
			e.mu.Unlock()
			if err != nil {
				o.fail(err)
			}
			o.launch()
		}
	}
}

// unhold gives back what is still held when the engine ends.
func (e *Engine) unhold() (ops []*operation) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, n := range e.names {
		ops = append(ops, n.held...)
		n.held = nil
	}
	ops = append(ops, e.gather.stop()...)
	e.holding()
	return ops
}

func (o *operation) String() string { return fmt.Sprintf("%v %q", o.Kind, o.name()) }
