package server

import (
	"math"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// codedValue is how a held value is read where its tensor is coded. A codec that is precise makes one message of
// each version, for all readers. Of the others a message says too little of a value, and a reader gets the
// difference to what it has:
//
//   - The server keeps the base that each reading rank has, and encodes value - base: once for all ranks with the
//     same base, as ranks have that the synchronisation model keeps together.
//   - Both add what the message says to the base, by the same operations, so that the bases stay the same bits.
//   - Each base has a number, which the rank gives back with its next read. Where the server's own says otherwise,
//     because an answer was lost or given up, or the base gave way where memory was short, it sends the value
//     itself, and both start anew with that.
//   - Where the tensor has a gate for pulls, a difference that it holds back is not sent: the rank stays at its base.
//
// The worker in this process gets what it would get elsewhere where a model keeps ranks together, which then hold the
// same bits, and where a gate is to hold for it too; else the value itself, which is nearer and costs no encoding.
type codedValue struct {
	by       codec.Codec // of differences, or of values
	precise  bool
	alike    bool         // the worker in this process gets what the others get
	version  uint64       // how often the value has changed
	message  *room.Buffer // precise: the value as it is; nil when it has changed since
	bases    map[int]*base
	whole    *base              // of those who get the value itself, as it is; nil when it has changed since
	telling  map[*base]struct{} // those with told
	withheld uint64             // answers that the gate held back
	numbers  uint32             // of bases so far
}

// newCodedValue makes it for a value; nil for a plain one.
func newCodedValue(v *value) *codedValue {
	if v.coding == nil {
		return nil
	}
	by := v.coding.codec.Difference()
	gated := v.t.PullGate != (options.Gate{})
	together := !v.t.Model.Ahead()
	return &codedValue{
		by: by, precise: !gated && by.Precise(), alike: gated || together, bases: map[int]*base{}, telling: map[*base]struct{}{},
	}
}

// unit is what one in the accumulator stands for. Where the share of a difference is a power of two it is that:
// then a message is added as it is, which for a sparse one takes the time of what it says, and the root's value
// is still exact.
func (v *value) unit() float64 {
	if share := v.share(); v.coded != nil && powerOfTwo(share) {
		return share
	}
	return 1
}

func powerOfTwo(f float64) bool {
	part, exponent := math.Frexp(f)
	return part == 0.5 && exponent > -64 && exponent < 64
}

// sumMessage adds what a rank's message says, or nothing where that fails. Callers hold mu.
func (v *value) sumMessage(r *reader, message []byte) error {
	c, pool := v.coding, v.t.r.s.pool
	scale := v.share() / v.unit()
	if scale == 1 && reduce.AccType(v.t.Type) == units.Float32 {
		if err := c.codec.DecodeAdd(v.acc, message); err != nil {
			return v.p.Malformed(r.rank, err)
		}
		v.outdate()
		return nil
	}
	wide, err := pool.Get(4 * c.Elements)
	if err != nil {
		return room.MemoryError{Err: err}
	}
	defer pool.Put(wide)
	if err := c.codec.Decode(wide, message); err != nil {
		return v.p.Malformed(r.rank, err)
	}
	reduce.AddFloat32(v.t.Type, v.acc, wide, scale)
	v.outdate()
	return nil
}

// outdateCoded lets go what was said of the version before.
func (v *value) outdateCoded() {
	c := v.coded
	if c == nil {
		return
	}
	c.version++
	if c.message != nil {
		c.message.Sent(nil)
		c.message = nil
	}
	for b := range c.telling {
		v.unsay(b)
	}
	v.leave(c.whole)
	c.whole = nil
}

// codedReply is the value for a rank that reads it. Callers hold mu.
func (v *value) codedReply(r *reader) reply {
	c, exact := v.coded, r.h.Flags&(wire.FlagPlain|wire.FlagDeclare) != 0
	if !v.room {
		exact = true // there is no value: copy says so
	}
	if c.precise && !exact {
		if err := v.makeMessage(); err == nil {
			return reply{reader: *r, res: c.message.Share(), codec: wire.CodecDeclared}
		}
	}
	if b := c.bases[r.rank]; b != nil && (b.number == r.h.Reference || r.to.Local()) && !exact {
		if reply, err := v.follow(r, b); err == nil {
			return reply
		}
	}
	res, err := v.copy()
	if err != nil || c.precise {
		return reply{reader: *r, res: res, err: err, code: units.FailMemory}
	}
	return reply{reader: *r, res: res, base: v.rebase(r.rank, res.Bytes)}
}

// makeMessage encodes the value, once for each version.
func (v *value) makeMessage() error {
	if v.coded.message != nil {
		return nil
	}
	wide, err := v.wide()
	if err != nil {
		return err
	}
	defer v.t.r.s.pool.Put(wide)
	message, err := v.encode(wide)
	if err == nil {
		v.coded.message = room.NewBuffer(v.t.r.s.pool, message)
	}
	return err
}

// wide is the value in float32, lent.
func (v *value) wide() ([]byte, error) {
	wide, err := v.t.r.s.pool.Get(4 * v.coding.Elements)
	if err == nil {
		reduce.StoreFloat32(v.t.Type, wide, v.acc, v.t.Postscale*v.unit())
	}
	return wide, err
}

// follow tells a rank with a base of the value as it is. Callers hold mu.
func (v *value) follow(r *reader, b *base) (reply, error) {
	t := b.told
	if t != nil && t.message == nil && t.at != v.machine.V() { // the gate's threshold may have fallen
		v.unsay(b)
		t = nil
	}
	if t == nil {
		var err error
		if t, err = v.tell(b); err != nil {
			return reply{}, err
		}
	}
	next := t.next
	if t.message == nil {
		next = b
		v.coded.withheld++
	}
	answer := reply{reader: *r, codec: wire.CodecDeclared, base: next.number}
	switch {
	case r.to.Local():
		if err := v.show(r.to.Out, next); err != nil {
			return reply{}, err
		}
	case t.message != nil:
		answer.res = t.message.Share()
	}
	if next != b {
		next.uses++
		v.coded.bases[r.rank] = next
		v.leave(b)
	}
	return answer, nil
}

// show writes what the ranks with a base have.
func (v *value) show(out []byte, b *base) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.elements == nil {
		return errNoBase
	}
	reduce.Narrow(v.t.Type, out, b.elements)
	return nil
}

// tell makes what the ranks with a base hear of the value as it is, once for all of them.
func (v *value) tell(b *base) (*told, error) {
	pool := v.t.r.s.pool
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.elements == nil {
		return nil, errNoBase
	}
	wide, err := v.wide()
	if err != nil {
		return nil, err
	}
	defer pool.Put(wide)
	t := &told{at: v.machine.V()}
	if !v.differ(wide, b.elements) {
		message, err := v.encode(wide)
		if err != nil {
			return nil, err
		}
		if t.next, err = v.moved(b, message); err != nil {
			pool.Put(message)
			return nil, err
		}
		t.message = room.NewBuffer(pool, message)
	}
	for from := range v.coded.telling { // else a rank that reads on would leave a base behind for each time
		if from.told.next == b {
			v.unsay(from)
		}
	}
	b.told = t
	v.coded.telling[b] = struct{}{}
	return t, nil
}

// differ takes a base from the value, and reports whether the gate holds the difference back.
func (v *value) differ(wide, base []byte) bool {
	threshold := v.t.PullGate.At(max(v.coding.before+v.machine.V(), 1))
	if threshold == 0 {
		reduce.Add(units.Sum, units.Float32, wide, base, -1)
		return false
	}
	size := reduce.Norm(wide)
	reduce.Add(units.Sum, units.Float32, wide, base, -1)
	change := reduce.Norm(wide)
	return change == 0 || change < threshold*size // what is not finite is sent
}

// moved is a base with what a message says. Callers hold its mutex.
func (v *value) moved(b *base, message []byte) (*base, error) {
	n, err := v.newBase()
	if err != nil {
		return nil, err
	}
	copy(n.elements, b.elements)
	err = v.coded.by.DecodeAdd(n.elements, message)
	n.mu.Unlock()
	if err != nil {
		v.leave(n)
		return nil, err
	}
	return n, nil
}

// newBase is one with arbitrary elements, and one use. Callers set the elements and unlock it.
func (v *value) newBase() (*base, error) {
	b, err := v.t.r.s.bases.add(v.coding.Elements)
	if err != nil {
		return nil, err
	}
	if v.coded.numbers++; v.coded.numbers == 0 { // 0 is no base
		v.coded.numbers = 1
	}
	b.number = v.coded.numbers
	return b, nil
}

// rebase notes that a rank gets the value itself, and gives the number of the base that it is; 0 where there is
// no memory for one, or no difference to it: infinity less infinity is NaN for ever, though the value may be finite again,
// or in float64 have never been anything else.
func (v *value) rebase(rank int, plain []byte) uint32 {
	c := v.coded
	if c.whole != nil && c.whole.gone() {
		v.leave(c.whole)
		c.whole = nil
	}
	if c.whole == nil {
		b, err := v.newBase()
		if err != nil {
			v.forgetBase(rank)
			return 0
		}
		reduce.Widen(v.t.Type, b.elements, plain)
		size := reduce.Norm(b.elements)
		b.mu.Unlock()
		if math.IsNaN(size) || math.IsInf(size, 0) {
			v.leave(b)
			v.forgetBase(rank)
			return 0
		}
		c.whole = b
	}
	c.whole.uses++
	v.forgetBase(rank)
	c.bases[rank] = c.whole
	return c.whole.number
}

// leave ends one use of a base; with the last it goes.
func (v *value) leave(b *base) {
	if b == nil {
		return
	}
	if b.uses--; b.uses == 0 {
		v.t.r.s.bases.remove(b)
		v.unsay(b)
	}
}

// unsay forgets what a base's ranks hear: the value has changed, or none are left.
func (v *value) unsay(b *base) {
	t := b.told
	if t == nil {
		return
	}
	b.told = nil
	delete(v.coded.telling, b)
	if t.message != nil {
		t.message.Sent(nil)
	}
	v.leave(t.next)
}

func (v *value) forgetBase(rank int) {
	v.leave(v.coded.bases[rank])
	delete(v.coded.bases, rank)
}

// dropBases forgets what some ranks have. Callers hold mu.
func (v *value) dropBases(gone func(rank int) bool) {
	if v.coded == nil {
		return
	}
	for rank := range v.coded.bases {
		if gone(rank) {
			v.forgetBase(rank)
		}
	}
}

// encode makes a message of the value, or of a difference to it.
func (v *value) encode(wide []byte) ([]byte, error) {
	c, pool := v.coding, v.t.r.s.pool
	residual, err := pool.Get(v.coded.by.ResidualBytes(c.Elements))
	if err != nil {
		return nil, err
	}
	defer pool.Put(residual)
	clear(residual)
	return c.Encode(v.coded.by, wide, residual, c.At(c.before+v.machine.V(), v.coded.version))
}
