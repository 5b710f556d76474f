package sums

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// key sums one partition of one tensor. Bytes are read without the lock, and added and answered for under it; answers
// are sent after it is released.
type key struct {
	*room.Part

	mu         lockorder.Mutex
	iterations iterations // behind mu
}

func newKey(t *room.Tensor, part uint32) (*key, error) {
	if t.Kind.HasRoot() && !t.Round.Elastic {
		return nil, fmt.Errorf("%q is a %v, which sums nothing", t.Name, t.Kind)
	}
	if t.Round.Hosts.Uplink != nil && !t.Up() {
		return nil, fmt.Errorf("%q is not summed by host", t.Name)
	}
	p, m, err := room.NewPart(t, part)
	if err != nil {
		return nil, err
	}
	k := &key{Part: p, iterations: iterations{Part: p, machine: m, slots: map[uint64]*slot{}}}
	k.iterations.left = t.Round.Leaves.Load() && k.keepsResidual()
	k.iterations.climbOf = k.climbOf
	k.mu.Place(room.LevelKey, "sums.key.mu")
	return k, nil
}

// keepsResidual reports whether the key's answers have a residual.
func (k *key) keepsResidual() bool {
	return k.Coding != nil && k.Answers.ResidualBytes(k.Coding.Elements) > 0
}

// push adds one rank's partition: the worker's in this process where it lies, as others are added, and what comes
// from elsewhere as it arrives.
func (k *key) push(q *room.Request) error {
	if err := k.Fits(q); err != nil {
		return err
	}
	_, inPlace := q.Payload.InPlace()
	if inPlace && (k.Gathers || k.Kind.HasRoot()) {
		return fmt.Errorf("a push of %v of %q in place, which is forwarded as it comes", k.Kind, k.Name)
	}
	s, err := k.open(q)
	switch {
	case errors.Is(err, errElsewhere):
		err := q.Payload.Discard()
		if err == nil {
			k.comeTooLate(q)
		}
		return err
	case errors.Is(err, errStraggler):
		return k.refuse(q)
	case errors.Is(err, errLeftOut):
		return k.leftOut(q)
	case err != nil:
		return k.unopened(q, err)
	}
	if s == nil {
		return k.late(q)
	}
	switch {
	case inPlace || q.Has(wire.FlagEmpty): // there is nothing to read
	case k.Whole:
		err = k.keep(s, q)
	case k.Coding != nil:
		err = k.receive(s, q)
	default:
		err = k.stream(s, q)
	}
	if err != nil {
		return err
	}
	k.arrived(s, q)
	return nil
}

func (k *key) open(q *room.Request) (*slot, error) {
	k.mu.Lock()
	away, answers := k.iterations.elsewhere()
	if away {
		k.mu.Unlock()
		k.deliver(answers)
		return nil, errElsewhere
	}
	defer k.mu.Unlock()
	return k.iterations.open(q)
}

// unopened ends a request for which nothing was begun.
func (k *key) unopened(q *room.Request, err error) error {
	err = k.unread(q, err)
	if err == nil {
		q.Reply.Fail(inprocess.ErrCancelled)
	}
	return err
}

// unread ends the operation of a payload that cannot be read: for want of memory on every rank, else with the
// connection. A push that was opened is answered when it has arrived, which finds its iteration given up.
func (k *key) unread(q *room.Request, err error) error {
	if !errors.As(err, new(room.MemoryError)) {
		return err
	}
	k.OutOfMemory(&q.Header, err)
	return nil
}

// stream adds the payload chunk by chunk while it arrives.
func (k *key) stream(s *slot, q *room.Request) error {
	for i := range s.chunks {
		b, err := q.Payload.Next(min(q.Payload.Len(), room.ChunkBytes))
		if err != nil {
			return err
		}
		k.mu.Lock()
		if k.iterations.accepts(s, q.Iteration) {
			s.add(i, q.From(), b)
		}
		k.mu.Unlock()
	}
	return nil
}

// keep reads the whole payload into a buffer of its own.
func (k *key) keep(s *slot, q *room.Request) error {
	b, err := q.Payload.Lend(k.Round.Pool)
	if err != nil {
		return k.unread(q, err)
	}
	k.mu.Lock()
	kept := k.iterations.accepts(s, q.Iteration)
	if kept {
		s.contributions[q.From()] = b
	}
	k.mu.Unlock()
	if !kept {
		k.Round.Pool.Put(b)
	}
	return nil
}

// receive reads a rank's message and adds it. One that cannot be decoded fails the operation.
func (k *key) receive(s *slot, q *room.Request) error {
	message, lent, err := q.Payload.Whole(k.Round.Pool)
	if err != nil {
		return k.unread(q, err)
	}
	k.mu.Lock()
	if k.iterations.accepts(s, q.Iteration) {
		err = s.addMessage(q.From(), message)
	}
	k.mu.Unlock()
	k.Round.Pool.Put(lent)
	if err != nil {
		k.Shell.Fail(q.Seq, units.FailUnsupported, err.Error())
		k.Shell.Drop(q.Iteration)
	}
	return nil
}

// arrived tells the machine that a rank's push has arrived whole, and does what it says.
func (k *key) arrived(s *slot, q *room.Request) {
	k.mu.Lock()
	if k.iterations.slots[q.Iteration] != s {
		k.mu.Unlock()
		k.comeTooLate(q)
		return
	}
	if tensor, ok := q.Payload.InPlace(); ok && !s.closed {
		s.lend(q.From(), tensor)
	}
	answers := k.iterations.arrived(s, q)
	k.mu.Unlock()
	k.deliver(answers)
}

// late takes a push of an iteration that was closed without it: it is counted, and never added, and its rank
// gets the sum that the others have (drop-stragglers).
func (k *key) late(q *room.Request) error {
	if err := q.Payload.Discard(); err != nil { // before its answer
		return err
	}
	k.mu.Lock()
	s := k.iterations.slots[q.Iteration]
	if s == nil || !s.closed || !s.absent.Has(q.From()) {
		k.mu.Unlock()
		if s == nil {
			k.comeTooLate(q)
		} else {
			q.Reply.Fail(inprocess.ErrCancelled)
		}
		return nil
	}
	answers := k.iterations.arrived(s, q)
	k.mu.Unlock()
	k.deliver(answers)
	return nil
}

// errLeftOut is of a push whose iteration was closed when its rank had joined. The join has failed since: another rank left instead.
var errLeftOut = errors.New("it was summed without this rank")

// leftOut ends the operation of such a push. The others have its result, and hear of it: what they have begun behind it does not match.
func (k *key) leftOut(q *room.Request) error {
	if err := q.Payload.Discard(); err != nil {
		return err
	}
	k.Shell.Fail(q.Seq, units.FailUnsupported, fmt.Sprintf("rank %d brings it after it was summed without that rank, which had joined; its join has failed since", q.From()))
	k.Shell.Drop(q.Iteration)
	q.Reply.Fail(inprocess.ErrCancelled)
	return nil
}

// UpdateMembership gives the machine the ranks that still take part. They are found under the lock, so that no older set
// replaces a newer one.
func (k *key) UpdateMembership() {
	k.mu.Lock()
	_, answers := k.iterations.elsewhere()
	answers = append(answers, k.iterations.live(k.Live())...) // also where the key is elsewhere: it may come back
	k.mu.Unlock()
	k.deliver(answers)
}

// Change schedules a change of conditions for its iteration.
func (k *key) Change(c room.Change) {
	k.mu.Lock()
	k.iterations.now = time.Now()
	k.iterations.changes.Add(c)
	answers := k.iterations.turn(nil)
	k.mu.Unlock()
	k.deliver(answers)
}

// cancel gives up the slots from an iteration on. Local operations end with err.
func (k *key) cancel(from uint64, err error) {
	k.mu.Lock()
	dropped, abandon := k.iterations.cancel(from)
	k.mu.Unlock()
	for _, f := range abandon {
		f()
	}
	for _, w := range dropped {
		w.to.Fail(err)
	}
}

func (k *key) waitsFor(rank int) []uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.iterations.waitsFor(rank)
}

// Pushed is the number of iterations that the furthest rank has pushed.
func (k *key) Pushed() uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.iterations.machine.Fastest()
}

// Tally is what the machine has counted.
func (k *key) Tally() room.Tally {
	k.mu.Lock()
	defer k.mu.Unlock()
	return room.Tally{Tally: k.iterations.machine.Tally()}
}

// deliver sends replies. The list is the key's again.
func (k *key) deliver(answers []answer) {
	if len(answers) == 0 {
		return
	}
	for _, a := range answers {
		switch {
		case a.up != nil:
			k.climb(a.up)
		case a.kept != nil:
			k.Round.Log.Warn("conditions stay", zap.String("tensor", k.Name), zap.Error(a.kept))
		case a.refused != nil:
			k.Shell.Fail(a.seq, room.CodeOf(a.refused), a.refused.Error())
		case a.moved:
			k.moved(&a)
		case a.gone:
			a.to.Fail(inprocess.ErrCancelled)
		case a.sum == nil:
			a.to.Release()
		case a.placed:
			h := k.header(&a)
			a.sum.Sent(nil)
			a.to.Done(h, nil)
		default:
			a.to.Deliver(k.header(&a), a.sum, k.fill)
		}
	}
	clear(answers)
	k.mu.Lock()
	k.iterations.answers = answers[:0]
	k.mu.Unlock()
}

// header is that of a result.
func (k *key) header(a *answer) wire.Header {
	h := wire.Header{
		Type: wire.TypeResult, DType: k.Type, Tensor: k.ID, Part: k.Number, Iteration: a.iteration, Seq: a.seq,
		Rank: uint16(a.last), Source: a.source, Divisor: uint16(a.divisor), Wait: wire.WaitOf(a.wait),
	}
	if k.Coding != nil {
		h.Codec = wire.CodecDeclared
	}
	h.Flags = k.AnswerFlags()
	if k.Bytes > 0 && len(a.sum.Bytes) == 0 && !a.placed {
		h.Flags |= wire.FlagEmpty
	}
	return h
}

// fill writes a result to where the worker in this process wants it.
func (k *key) fill(_ wire.Header, out, result []byte) error {
	if k.Coding != nil {
		return k.Coding.Decode(k.Answers, out, result)
	}
	clear(out[copy(out, result):]) // nothing stands for zeros
	return nil
}
