package server

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// value is one partition of a tensor that the servers hold: ranks add differences to it, and read it as it
// is when the machine lets them (algorithms.md's dataflow "accumulate").
//
// Invariants: acc is the root's value plus every difference that the machine admitted, each once and whole, in
// units of unit().
// A reader gets the bytes of one version: a copy that is made at most once for each.
type value struct {
	decided
	acc      []byte       // in the accumulator's type
	room     bool         // acc has its memory
	over     bool         // it was given up
	known    bool         // the root's value has come
	declared rankset.Set  // ranks that wait for that, or have it
	copied   *room.Buffer // acc in the tensor's type, nil when it has changed since
	coded    *codedValue  // nil for plain
	readers  []reader
	tuner    atomic.Pointer[tuner] // nil where the model needs none
	tuned    uint64                // V from which that one's conditions hold
}

// reader is a rank that waits for the value.
type reader struct {
	rank   int
	to     room.Reply
	h      wire.Header // of its push or pull
	since  time.Time
	warned time.Time
}

// value finds or makes the value of one partition.
func (t *tensor) value(part uint32) (*value, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.values[part]; v != nil {
		return v, nil
	}
	p, err := room.NewPart(t.Tensor, part)
	if err != nil {
		return nil, err
	}
	m, err := p.Machine()
	if err != nil {
		return nil, err
	}
	v := &value{decided: decided{t: t, p: p, part: part, bytes: p.Bytes, coding: newCoding(p), machine: m}}
	v.coded = newCodedValue(v)
	tuner, pull := t.r.tune(t.Model, v)
	v.tuner.Store(tuner)
	v.outputs = v.machine.Step(condition.SetPull(pull), v.outputs[:0])
	t.values[part] = v
	return v, nil
}

// serve takes in a request of a held value.
func (t *tensor) serve(q *room.Request) error {
	if q.Type != wire.TypePush && q.Type != wire.TypePull {
		return fmt.Errorf("%v of %q, a value that servers hold", q.Type, t.Name)
	}
	v, err := t.value(q.Part)
	if err != nil {
		return err
	}
	if q.Type == wire.TypePush {
		return v.add(q)
	}
	v.pull(&reader{rank: q.From(), to: q.Reply, h: q.Header})
	return nil
}

// add takes in a difference, or the root's value. It is added when it is whole, because only then the machine says
// whether it counts.
func (v *value) add(q *room.Request) error {
	if err := v.p.Fits(q); err != nil {
		return err
	}
	r := &reader{rank: q.From(), to: q.Reply, h: q.Header}
	err := v.makeRoom()
	var b, lent []byte
	if err == nil {
		b, lent, err = q.Payload.Whole(v.t.r.s.pool)
	}
	if errors.As(err, new(room.MemoryError)) {
		v.outOfMemory(r, err)
		r.to.Fail(inprocess.ErrCancelled)
		return nil
	} else if err != nil {
		return err
	}
	taken := v.push(r, b)
	v.t.r.s.pool.Put(lent)
	if taken && q.Has(wire.FlagNoPull) && q.Reply.Local() {
		q.Reply.Done(0, nil)
	}
	return nil
}

// outOfMemory ends an operation: a declaration on every rank, what comes later on its rank alone, because
// the others are at operations of their own.
func (v *value) outOfMemory(r *reader, err error) {
	if r.h.Flags&wire.FlagDeclare != 0 {
		v.t.OutOfMemory(&r.h, err)
	} else {
		v.refuse(r, units.FailMemory, err.Error())
	}
}

// makeRoom takes the memory for the value.
func (v *value) makeRoom() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.room || v.over {
		return nil
	}
	acc, err := v.t.r.s.pool.Get(reduce.AccBytes(v.t.Type, v.bytes))
	if err == nil {
		clear(acc)
		v.acc, v.room = acc, true
		return nil
	}
	return room.MemoryError{Err: err}
}

// push adds what has arrived whole, if the machine admits it, and answers whom that sets free. It reports
// whether the push was taken; the reader hears of it if not.
func (v *value) push(r *reader, b []byte) (taken bool) {
	var replies []reply
	v.mu.Lock()
	open := v.machine.V()
	switch {
	case v.givenUp(r):
		replies = append(replies, reply{reader: *r, err: inprocess.ErrCancelled})
	case r.h.Flags&wire.FlagDeclare != 0:
		if !v.known {
			v.known = true
			v.sum(b, 1/v.unit())
		}
		replies, taken = v.declare(r, replies), true
	case r.h.Flags&wire.FlagWithin != 0:
		err := v.take(r, b)
		if taken = err == nil; !taken {
			replies = append(replies, reply{reader: *r, err: err, code: room.CodeOf(err)})
		} else if r.h.Flags&wire.FlagNoPull == 0 {
			replies = v.ask(r, replies)
		}
	default:
		if replies, taken = v.step(condition.Push(r.rank, r.h.Iteration, r.h.Significance), r, b, replies); taken && r.h.Flags&wire.FlagNoPull == 0 {
			replies = v.ask(r, replies)
		}
	}
	closed := v.machine.V() > open
	v.mu.Unlock()
	if taken && r.h.Flags&(wire.FlagDeclare|wire.FlagWithin) == 0 {
		v.tuner.Load().pushed(v, r.rank, r.h.Iteration, closed) // before it is answered: what lies between is its interval
	}
	v.deliver(replies)
	return taken
}

// givenUp reports whether the value was, or by its rank the operation: nobody would answer it. Callers hold mu.
func (v *value) givenUp(r *reader) bool {
	seq, ok := v.t.forgotten.Load(r.rank)
	return v.over || ok && r.h.Seq <= seq.(uint64)
}

// pull asks for the value.
func (v *value) pull(r *reader) {
	var replies []reply
	v.mu.Lock()
	switch {
	case v.givenUp(r):
		replies = append(replies, reply{reader: *r, err: inprocess.ErrCancelled})
	case r.h.Flags&wire.FlagDeclare != 0:
		replies = v.declare(r, replies)
	default:
		replies = v.ask(r, replies)
	}
	v.mu.Unlock()
	v.deliver(replies)
}

// declare waits until every rank has come for the root's value, so that ranks which disagree about it are
// found out before anyone goes on. Callers hold mu.
func (v *value) declare(r *reader, replies []reply) []reply {
	v.declared.Add(r.rank)
	v.coding.had(r.h.Before)
	v.wait(r)
	return v.open(replies)
}

func (v *value) wait(r *reader) {
	r.since = time.Now()
	v.readers = append(v.readers, *r)
}

// open answers those who wait for the root's value. Callers hold mu.
func (v *value) open(replies []reply) []reply {
	if !v.known || !v.declared.Covers(v.machine.Live()) {
		return replies
	}
	return v.answer(func(r *reader) bool { return r.h.Flags&wire.FlagDeclare != 0 }, replies)
}

// ask has the machine decide when the rank gets the value. Callers hold mu.
func (v *value) ask(r *reader, replies []reply) []reply {
	v.wait(r)
	if r.h.Flags&wire.FlagNow != 0 {
		return v.answer(func(w *reader) bool { return w.rank == r.rank && w.h.Seq == r.h.Seq }, replies)
	}
	replies, _ = v.step(condition.Pull(r.rank, r.h.Iteration), r, nil, replies)
	return replies
}

// reply is what is to be sent without holding the value.
type reply struct {
	reader
	res   *room.Buffer // nil for a worker in this process that has it, and for nothing that is worth sending
	codec uint8        // of res
	base  uint32       // number of the base that the rank has with it; 0 for none

	code units.FailureCode // of err
	err  error             // instead of the value; ErrCancelled for what its rank has given up itself
}

// step drives the machine for a reader, or for nobody. b is what a push adds, nil for nothing; taken reports that the machine
// did not refuse. Callers hold mu.
func (v *value) step(in condition.Input, r *reader, b []byte, replies []reply) (_ []reply, taken bool) {
	v.outputs = v.machine.Step(in, v.outputs[:0])
	taken = true
	for _, o := range v.outputs {
		switch o.Kind {
		case condition.Admit:
			if r == nil { // its rank is elsewhere, and adds nothing
				continue
			}
			if err := v.take(r, b); err != nil {
				taken = false
				replies = append(replies, reply{reader: *r, err: err, code: room.CodeOf(err)})
			}
		case condition.Answer:
			replies = v.answer(func(w *reader) bool {
				return w.rank == o.Rank && w.h.Iteration == o.Progress && w.h.Flags&(wire.FlagDeclare|wire.FlagNow) == 0
			}, replies)
		case condition.Refuse:
			taken = false
			if r != nil {
				replies = append(replies, reply{reader: *r, err: o.Err, code: units.FailUnsupported})
			}
		}
	}
	return v.turn(replies), taken
}

// share is what a difference counts for: the mean over all ranks that train, those that have left included,
// so that what one rank adds does not weigh more for the others' leaving.
func (v *value) share() float64 {
	if v.t.Reduce == units.Average {
		return v.t.Prescale / float64(len(v.t.Ranks))
	}
	return v.t.Prescale
}

// sum adds a rank's bytes. Callers hold mu.
func (v *value) sum(b []byte, scale float64) {
	reduce.Add(units.Sum, v.t.Type, v.acc, b, scale)
	v.outdate()
}

// take adds what a push brings. A message that cannot be read adds nothing, and its operation fails; the push
// has been counted. Callers hold mu.
func (v *value) take(r *reader, b []byte) error {
	switch {
	case r.h.Flags&wire.FlagEmpty != 0:
		return nil
	case v.coded != nil:
		return v.sumMessage(r, b)
	}
	v.sum(b, v.share())
	return nil
}

// outdate lets the copy go. Callers hold mu.
func (v *value) outdate() {
	v.outdateCoded()
	if v.copied != nil {
		v.copied.Sent(nil)
		v.copied = nil
	}
}

// answer takes those who are due out of the readers; their replies are due. Callers hold mu.
func (v *value) answer(due func(*reader) bool, replies []reply) []reply {
	kept := v.readers[:0]
	for _, r := range v.readers {
		if !due(&r) {
			kept = append(kept, r)
			continue
		}
		replies = append(replies, v.replyTo(&r))
	}
	v.readers = kept
	return replies
}

// replyTo is the value for a reader. Callers hold mu.
func (v *value) replyTo(r *reader) reply {
	if v.coded != nil && (!r.to.Local() || v.coded.alike) {
		return v.codedReply(r)
	}
	res, err := v.copy()
	return reply{reader: *r, res: res, err: err, code: units.FailMemory}
}

// copy is the value as it is, for one reader more. Callers hold mu.
func (v *value) copy() (*room.Buffer, error) {
	if !v.room {
		return nil, fmt.Errorf("%q has no value", v.t.Name)
	}
	if v.copied == nil {
		b, err := v.t.r.s.pool.Get(v.bytes)
		if err != nil {
			return nil, room.MemoryError{Err: err}
		}
		reduce.Store(v.t.Type, b, v.acc, v.t.Postscale*v.unit(), 1)
		v.copied = room.NewBuffer(v.t.r.s.pool, b)
	}
	return v.copied.Share(), nil
}

// deliver sends replies.
func (v *value) deliver(replies []reply) {
	for _, r := range replies {
		v.tuner.Load().freed(v, r.rank)
		switch {
		case errors.Is(r.err, inprocess.ErrCancelled):
			r.to.Fail(r.err)
		case r.err != nil:
			v.refuse(&r.reader, r.code, r.err.Error())
			r.to.Fail(inprocess.ErrCancelled)
		case r.to.Local():
			r.to.Done(0, v.fill(&r))
		default:
			h := wire.Header{
				Type: wire.TypeResult, DType: v.t.Type, Tensor: v.t.ID, Part: v.part, Iteration: r.h.Iteration, Seq: r.h.Seq,
				Codec: r.codec, Reference: r.base,
			}
			if r.res != nil {
				r.to.Send(h, r.res.Bytes, r.res)
			} else {
				h.Flags = wire.FlagEmpty
				r.to.Confirm(h)
			}
		}
	}
}

// fill writes an answer to where the worker in this process wants it.
func (v *value) fill(r *reply) (err error) {
	if r.res == nil {
		return nil
	}
	if r.codec == wire.CodecDeclared {
		err = v.coding.Decode(v.coded.by, r.to.Out, r.res.Bytes)
	} else {
		copy(r.to.Out, r.res.Bytes)
	}
	r.res.Sent(nil)
	return err
}

// refuse tells one rank, and nobody else, that its operation has failed.
func (v *value) refuse(r *reader, code units.FailureCode, text string) {
	v.t.Refuse(r.rank, r.h.Seq, code, text)
}

// live tells the machine who still takes part.
func (v *value) live() {
	v.mu.Lock()
	live := v.t.Live()
	if live.Len() == 0 {
		v.mu.Unlock()
		return
	}
	replies, _ := v.step(condition.Live(live), nil, nil, nil)
	replies = v.open(replies)
	v.dropBases(func(rank int) bool { return !live.Has(rank) })
	v.mu.Unlock()
	v.tuner.Load().updateMembership(v, live)
	v.deliver(replies)
}

// cancel gives the value up.
func (v *value) cancel(err error) {
	v.mu.Lock()
	readers := v.readers
	v.readers = nil
	v.over = true
	if v.room {
		v.t.r.s.pool.Put(v.acc)
		v.acc, v.room = nil, false
	}
	v.outdate()
	v.dropBases(func(int) bool { return true })
	v.mu.Unlock()
	v.tuner.Load().release(v)
	for _, r := range readers {
		r.to.Fail(err)
	}
}

// heldParts are the values of the partitions that lie here.
func (t *tensor) heldParts() []*value {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.values))
}

// holdsValue reports whether a value of the tensor lies here.
func (t *tensor) holdsValue() bool {
	for _, v := range t.heldParts() {
		v.mu.Lock()
		room := v.room
		v.mu.Unlock()
		if room {
			return true
		}
	}
	return false
}

// opened reports whether every rank has got the value that its declaration gives.
func (v *value) opened() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.known && v.declared.Covers(v.machine.Live())
}

// forget drops what a rank waits for, which has given it up with this operation. The value itself goes with
// a declaration that has failed: it does so on every rank.
func (t *tensor) forget(rank int, seq uint64, failed bool) {
	t.forgotten.Store(rank, seq) // for what is on its way to the value
	for _, v := range t.heldParts() {
		if failed && !v.opened() {
			v.cancel(inprocess.ErrCancelled)
		}
		v.mu.Lock()
		v.dropBases(func(r int) bool { return r == rank })
		v.mu.Unlock()
		for _, r := range v.takeOut(func(r *reader) bool { return r.rank == rank && r.h.Seq <= seq }) {
			r.to.Fail(inprocess.ErrCancelled)
		}
	}
}

// busiest is the partition for which most ranks wait, nil if none does.
func (t *tensor) busiest() (most *value) {
	readers := 0
	for _, v := range t.heldParts() {
		v.mu.Lock()
		if len(v.readers) > readers {
			most, readers = v, len(v.readers)
		}
		v.mu.Unlock()
	}
	return most
}

func (v *value) takeOut(which func(*reader) bool) (taken []reader) {
	v.mu.Lock()
	defer v.mu.Unlock()
	kept := v.readers[:0]
	for _, r := range v.readers {
		if which(&r) {
			taken = append(taken, r)
		} else {
			kept = append(kept, r)
		}
	}
	v.readers = kept
	return taken
}

// checkStalls warns of ranks that wait long for the value, and ends those that wait too long. (Ranks that do
// not come to declare it are found out by the name.)
func (t *tensor) checkStalls(now time.Time) {
	if !t.Held() {
		return
	}
	v := t.busiest() // one partition speaks for all
	if v == nil {
		return
	}
	cfg := &t.r.s.cfg
	v.mu.Lock()
	missing := v.machine.Missing(v.machine.V())
	v.mu.Unlock()
	var slow []reader
	ended := v.takeOut(func(r *reader) bool {
		switch waited := now.Sub(r.since); {
		case r.h.Flags&wire.FlagDeclare != 0:
		case cfg.StallShutdown > 0 && waited >= cfg.StallShutdown:
			return true
		case cfg.StallWarning > 0 && waited >= cfg.StallWarning && now.Sub(r.warned) >= cfg.StallWarning:
			r.warned = now
			slow = append(slow, *r)
		}
		return false
	})
	for _, r := range slow {
		t.Warn(r.rank, missing, now.Sub(r.since))
	}
	for _, r := range ended {
		v.refuse(&r, units.FailStall, fmt.Sprintf("stalled: %s did not come within %v", missing.Named(), cfg.StallShutdown))
		r.to.Fail(inprocess.ErrCancelled)
	}
}
