package held

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// value is one partition of a tensor that the servers hold. What a push brings is read without the lock, and added
// whole under it; replies are sent after it is released.
type value struct {
	*room.Part
	room  *Room
	tuner atomic.Pointer[tuner] // nil where the model needs none

	mu    lockorder.Mutex
	state readers // behind mu
}

// newValue makes the value of one partition; ErrCancelled where the tensor was given up.
func newValue(x *Room, part uint32) (*value, error) {
	if x.t.GivenUp() { // Cancel does not find a value that is made after it
		return nil, inprocess.ErrCancelled
	}
	p, m, err := room.NewPart(x.t, part)
	if err != nil {
		return nil, err
	}
	v := &value{Part: p, room: x, state: newReaders(p, m, x.copies)}
	v.mu.Place(room.LevelKey, "held.value.mu")
	tuner := x.tuners.of(p.ProcessSet, p.Model, p.Round.Log)
	v.tuner.Store(tuner)
	tuner.watch(v) // sets nobody free: none waits yet
	return v, nil
}

// push accepts a difference, or the root's value. It is added when it is whole, because only then the machine says
// whether it counts.
func (v *value) push(q *room.Request) error {
	if err := v.Fits(q); err != nil {
		return err
	}
	r := &reader{rank: q.From(), to: q.Reply, h: q.Header}
	b, lent, err := q.Payload.Whole(v.Round.Pool)
	taken := false
	if err == nil {
		taken, err = v.add(r, b)
		v.Round.Pool.Put(lent)
	}
	if errors.As(err, new(room.MemoryError)) {
		v.outOfMemory(r, err)
		return nil
	}
	if taken && q.Has(wire.FlagNoPull) {
		q.Reply.Release()
	}
	return err
}

// outOfMemory ends an operation: a declaration on every rank, what comes later on its rank alone, because
// the others are at operations of their own.
func (v *value) outOfMemory(r *reader, err error) {
	if r.has(wire.FlagDeclare) {
		v.OutOfMemory(&r.h, err)
		r.to.Fail(inprocess.ErrCancelled)
	} else {
		v.refuse(r, err)
	}
}

// add adds what has arrived whole, if the machine admits it, and answers whom that sets free. It reports
// whether the push was taken; the reader hears of it if not. An error is that there is no memory for the value.
func (v *value) add(r *reader, b []byte) (taken bool, err error) {
	v.mu.Lock()
	away, replies := v.elsewhere()
	open := v.state.machine.V()
	switch {
	case away:
		replies = append(replies, reply{reader: *r, kind: moves})
	case v.state.over || v.room.gaveUp(r):
		replies = append(replies, reply{reader: *r, err: inprocess.ErrCancelled})
	default:
		if err = v.state.makeRoom(); err == nil {
			replies, taken = v.state.push(r, b)
		}
	}
	closed := v.state.machine.V() > open
	v.mu.Unlock()
	if taken && !r.has(wire.FlagDeclare|wire.FlagWithin) {
		v.tuner.Load().pushed(v, r.rank, r.h.Iteration, closed) // before it is answered: what lies between is its interval
	}
	v.deliver(replies)
	return taken, err
}

// pull asks for the value.
func (v *value) pull(q *room.Request) {
	r := &reader{rank: q.From(), to: q.Reply, h: q.Header}
	v.mu.Lock()
	away, replies := v.elsewhere()
	switch {
	case away:
		replies = append(replies, reply{reader: *r, kind: moves})
	case v.state.over || v.room.gaveUp(r):
		replies = append(replies, reply{reader: *r, err: inprocess.ErrCancelled})
	default:
		replies = v.state.pull(r)
	}
	v.mu.Unlock()
	v.deliver(replies)
	if r.has(wire.FlagDeclare) {
		v.orphaned()
	}
}

// orphaned ends the declarations of a value whose root has gone before it gave it (in an elastic job).
func (v *value) orphaned() {
	if !v.Lost().Has(v.Root) {
		return
	}
	v.mu.Lock()
	var seqs []uint64
	if v.state.inherited.waits() && !v.state.declared.Covers(v.state.machine.Live()) {
		v.mu.Unlock()
		return // another rank may have it from a lost server
	}
	for i := range v.state.waiting {
		if r := &v.state.waiting[i]; r.has(wire.FlagDeclare) && !v.state.known {
			seqs = append(seqs, r.h.Seq)
		}
	}
	v.mu.Unlock()
	for _, seq := range seqs {
		v.Shell.Fail(seq, units.FailUnsupported, fmt.Sprintf("its root, rank %d, has gone before it gave the value", v.Root))
	}
}

// excuse counts a superstep for the push with which a rank would have ended it.
func (v *value) excuse(rank int, superstep uint64) {
	v.mu.Lock()
	away, replies := v.elsewhere()
	if !away { // else the rank says so at the other server
		replies = v.state.excuse(rank, superstep)
	}
	v.mu.Unlock()
	v.deliver(replies)
}

// Change makes a change of conditions. It hands the value over to the tuner of the model whose pull condition it gets,
// if that has one.
func (v *value) Change(c room.Change) {
	if c.Pull != nil {
		v.tuner.Swap(nil).release(v)
	}
	v.mu.Lock()
	away, replies := v.elsewhere()
	if !away { // else the server that has it hears of the change too
		replies = v.state.change(c)
	}
	v.mu.Unlock()
	v.deliver(replies)
	if c.Pull != nil && !away {
		tuner := v.room.tuners.of(v.ProcessSet, *c.Pull, v.Round.Log)
		v.tuner.Swap(tuner).release(v)
		v.deliver(tuner.watch(v))
	}
}

// retune sets the pull condition that a tuner has found, and reports whether the value has not been given up.
func (v *value) retune(pull condition.PullCondition) (replies []reply, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.state.over {
		return nil, false
	}
	return v.state.retune(pull), true
}

// UpdateMembership gives the machine the ranks that still take part. They are found under the lock, so that no older set
// replaces a newer one.
func (v *value) UpdateMembership() {
	v.mu.Lock()
	live := v.Live()
	away, replies := v.elsewhere()
	if !away {
		replies = v.state.live(live)
	}
	v.mu.Unlock()
	if live.Len() > 0 {
		v.tuner.Load().updateMembership(v, live)
	}
	v.deliver(replies)
	v.orphaned()
}

// cancel gives the value up.
func (v *value) cancel(err error) {
	v.mu.Lock()
	dropped := v.state.cancel()
	v.mu.Unlock()
	v.tuner.Load().release(v)
	for _, r := range dropped {
		r.drop(v.Round.Pool)
		r.to.Fail(err)
	}
}

// opened reports whether every rank has got the value that its declaration gives.
func (v *value) opened() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state.opened()
}

func (v *value) forget(rank int, seq uint64) []reader {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state.deltas.forget(func(r int) bool { return r == rank })
	return v.state.remove(func(r *reader) bool { return r.rank == rank && r.h.Seq <= seq })
}

func (v *value) holds() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state.present
}

// Pushed is the number of iterations that the furthest rank has pushed.
func (v *value) Pushed() uint64 {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state.machine.Fastest()
}

// Tally is what the machine has counted, and what the gate has held back.
func (v *value) Tally() room.Tally {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state.tally()
}

func (v *value) waiting() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.state.waiting)
}

func (v *value) waits() (since time.Time, missing rankset.Set, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state.waits()
}

func (v *value) stalled(now time.Time) (missing rankset.Set, slow, ended []reader) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state.stalled(now)
}

// deliver sends replies.
func (v *value) deliver(replies []reply) {
	for i := range replies {
		r := &replies[i]
		if v.left(r) {
			continue
		}
		v.tuner.Load().freed(v, r.rank)
		switch {
		case errors.Is(r.err, inprocess.ErrCancelled):
			r.to.Fail(r.err)
		case r.err != nil:
			v.refuse(&r.reader, r.err)
		default:
			if r.covers != nil && r.to.To != nil {
				r.to.To.Send(v.coverHeader(r), r.covers, nil, r.to.Priority)
			}
			r.to.Deliver(v.header(r), r.bytes, v.fill)
		}
	}
}

// header is that of an answer.
func (v *value) header(r *reply) wire.Header {
	h := wire.Header{
		Type: wire.TypeResult, DType: v.Type, Tensor: v.ID, Part: v.Number, Iteration: r.h.Iteration, Seq: r.h.Seq,
		Codec: r.codec, Reference: r.number, Flags: v.AnswerFlags(), Wait: wire.WaitOf(r.waited),
	}
	if r.bytes == nil {
		h.Flags |= wire.FlagEmpty
	}
	return h
}

// fill writes an answer to where the worker in this process wants it.
func (v *value) fill(h wire.Header, out, result []byte) error {
	if h.Codec == wire.CodecDeclared {
		return v.Coding.Decode(v.state.deltas.by, out, result)
	}
	copy(out, result)
	return nil
}

// refuse tells one rank, and nobody else, that its operation has failed.
func (v *value) refuse(r *reader, err error) {
	code := room.CodeOf(err)
	if errors.As(err, new(stallError)) {
		code = units.FailStall
	}
	v.Shell.Refuse(r.rank, r.h.Seq, code, err.Error())
	r.to.Fail(inprocess.ErrCancelled)
}

// stallError is why a rank waits no longer.
type stallError struct {
	missing rankset.Set
	after   time.Duration
}

func (e stallError) Error() string {
	return fmt.Sprintf("stalled: %s did not come within %v", e.missing.Named(), e.after)
}
