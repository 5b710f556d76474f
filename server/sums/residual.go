package sums

import (
	"fmt"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// state gives a rank the residual of a key's answers, for its checkpoint. A rank asks for what it has got the last
// answer of, so that no sum is closed until it pushes again; but the push of another rank may have the residual leave. Without a residual the
// answer is empty. Where it may be elsewhere the answer is that the key has been moved, or there is none.
func (k *key) state(q *room.Request) error {
	if err := k.coded(q); err != nil {
		return err
	}
	k.mu.Lock()
	away, answers := k.iterations.elsewhere()
	left := k.iterations.left
	residual := k.iterations.stateFor(q.From())
	k.mu.Unlock()
	k.deliver(answers)
	switch {
	case residual != nil:
		q.Reply.Send(answerTo(&q.Header), residual.Bytes, residual)
	case left: // its rank is about to hear that, and asks the heir
	case away:
		q.Moved()
	default:
		q.Reply.Confirm(answerTo(&q.Header))
	}
	return nil
}

// stateFor is the residual behind the last answer that a rank has got, shared; nil where it is not here.
func (n *iterations) stateFor(rank int) *room.Buffer {
	switch {
	case n.residual != nil:
		return n.residual.Share()
	case n.handed.askers.Has(rank):
		return n.handed.residual.Share()
	}
	return nil
}

// handed is a residual that has been handed on, for checkpoints of ranks that still have to push: they do not know that it is elsewhere. It has no memory of its own
// while it is on its way. No sum that changes it is closed before they all have pushed, and they push here first. Or it is a copy of one that has been handed on elsewhere.
type handed struct {
	residual *room.Buffer // nil for none
	askers   rankset.Set  // those ranks
}

// forget lets it go.
func (h *handed) forget() {
	if h.residual != nil {
		h.residual.Sent(nil)
	}
	*h = handed{}
}

// keepFor has only those of its ranks stay that are among others.
func (h *handed) keepFor(ranks rankset.Set) {
	if h.residual == nil {
		return
	}
	if h.askers = h.askers.Overlap(ranks); h.askers.Len() == 0 {
		h.forget()
	}
}

// pushed notes that a rank's push is sent away: it asks elsewhere from now on.
func (h *handed) pushed(rank int) {
	if h.askers.Remove(rank) && h.askers.Len() == 0 {
		h.forget()
	}
}

// restore accepts a piece of a key's residual, as a checkpoint has it. The rank waits for the answer before it
// pushes, so that the first sum that its push closes is encoded with the residual.
func (k *key) restore(q *room.Request) error {
	err := k.coded(q)
	if err == nil {
		err = k.hasRoom(q)
	}
	if err != nil {
		return err
	}
	b, lent, err := q.Payload.Whole(k.Round.Pool)
	if err != nil {
		return k.unopened(q, err)
	}
	k.mu.Lock()
	away, answers := k.iterations.elsewhere()
	left := k.iterations.left
	if !away && !left {
		k.iterations.here.Add(q.From())
		err = k.iterations.setResidual(4*int(q.Offset), b)
	}
	k.mu.Unlock()
	k.Round.Pool.Put(lent)
	k.deliver(answers)
	switch {
	case err != nil:
		return k.unopened(q, err)
	case away:
		q.Moved()
	case !left: // else its rank is about to hear that, and sends it to the heir
		q.Reply.Confirm(answerTo(&q.Header))
	}
	return nil
}

func answerTo(h *wire.Header) wire.Header {
	return wire.Header{Type: wire.TypeResult, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Seq: h.Seq, Offset: h.Offset}
}

func (k *key) coded(q *room.Request) error {
	if k.Coding == nil {
		return fmt.Errorf("%v of partition %d of %q, which is not coded", q.Type, q.Part, k.Name)
	}
	return nil
}

// hasRoom checks that a piece lies within the key's residual, before memory is taken.
func (k *key) hasRoom(q *room.Request) error {
	n, size := q.Payload.Len(), uint64(k.Answers.ResidualBytes(k.Coding.Elements))
	if n%4 != 0 || uint64(n)+4*uint64(q.Offset) > size {
		return fmt.Errorf("%d bytes from element %d on for partition %d of %q, whose answers by %s keep a residual of %d bytes",
			n, q.Offset, k.Number, k.Name, k.Answers, size)
	}
	return nil
}

// ownResidual is the residual to be changed; nil where the codec has none. One that is being sent stays as it is, and
// a copy takes its place.
func (n *iterations) ownResidual() ([]byte, error) {
	if n.residual != nil && !n.residual.Shared() {
		return n.residual.Bytes, nil
	}
	size := n.Answers.ResidualBytes(n.Coding.Elements)
	if size == 0 {
		return nil, nil
	}
	b, err := n.Round.Pool.Get(size)
	if err != nil {
		return nil, room.MemoryError{Err: err}
	}
	if n.residual == nil {
		clear(b)
	} else {
		copy(b, n.residual.Bytes)
		n.residual.Sent(nil)
	}
	n.residual = room.NewBuffer(n.Round.Pool, b)
	n.handed.forget()
	return b, nil
}

// setResidual overwrites a piece of the residual, unless no iteration can follow. Where a sum closed before the piece
// came, as drop-stragglers lets it, the residual has what that answer lacked, and the piece is added.
func (n *iterations) setResidual(at int, piece []byte) error {
	if n.GivenUp() {
		return nil
	}
	residual, err := n.ownResidual()
	switch {
	case err != nil:
	case n.machine.V() > 0 && len(residual) > 0:
		reduce.Add(units.Sum, units.Float32, residual[at:at+len(piece)], piece, 1)
	default:
		copy(residual[at:], piece)
	}
	return err
}

// trim lets the residual go when no iteration can follow.
func (n *iterations) trim() {
	if len(n.slots) > 0 || !n.GivenUp() {
		return
	}
	if n.residual != nil {
		n.residual.Sent(nil)
		n.residual = nil
	}
	n.handed.forget()
}
