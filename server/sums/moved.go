package sums

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// What a key does in an elastic job that has been moved to another server while this one lives (decision 99): from one moment on it sends away all that comes for
// it, and what has come and was not answered. A result that a rank has supplied here that rank brings to the other server. The residual of the key's answers goes with
// the first push that is sent away (decision 114): its rank brings it there before that push, and so before the sum that the push is in. Ranks that have not pushed since
// still find it here, for their checkpoints.

// errElsewhere is of a push that comes after that moment.
var errElsewhere = errors.New("the key has been moved to another server")

// elsewhere looks where the key is, if there is a new epoch, and empties the key where it has left: what is returned is to be sent away.
func (n *iterations) elsewhere() (away bool, answers []answer) {
	if !n.Round.Elastic {
		return false, nil
	}
	away, left := n.whereabouts.Look(n.Part)
	if !left {
		return away, nil
	}
	var pushed []int
	for iteration, s := range n.slots {
		if s.supplied {
			s.waiters = append(s.waiters, s.supplier)
		}
		for _, w := range s.waiters {
			a := answer{to: w.to, moved: true, iteration: iteration, seq: w.seq, source: w.source}
			if !s.closed {
				a.carries, pushed = n.handOn(), append(pushed, w.rank)
			}
			answers = append(answers, a)
		}
	}
	for _, rank := range pushed {
		n.sentAway(rank)
	}
	n.cancel(0)
	if err := n.start(0); err != nil { // as a key that has never been here, if it comes back
		answers = append(answers, answer{refused: err})
	}
	return true, answers
}

// sentAway notes that a rank's push goes to another server, as what that rank pushes and asks next.
func (n *iterations) sentAway(rank int) {
	n.here.Remove(rank)
	n.handed.pushed(rank)
}

// handOn takes the residual out of a key that is elsewhere, nil for none.
func (n *iterations) handOn() *room.Buffer {
	residual := n.residual
	if residual != nil {
		n.residual = nil
		if askers := n.here.Overlap(n.machine.Live()); askers.Len() > 0 { // others may go past this server
			n.handed = handed{residual: residual.Share(), askers: askers}
		}
	}
	return residual
}

// leave empties a key whose answers have a residual, and takes that out, with the rank among those there that is to carry it, and the flags of its frame.
func (k *key) leave(there rankset.Set) (residual *room.Buffer, carrier int, flags wire.Flags) {
	if !k.keepsResidual() {
		return nil, 0, 0
	}
	keeper := k.Keeper(k.Number)
	k.mu.Lock()
	defer k.mu.Unlock()
	n := &k.iterations
	n.left = true
	n.cancel(0)
	residual, carrier, flags = n.residual, n.carrier(keeper, there), wire.FlagLast
	if residual == nil && n.handed.askers.Has(keeper) && there.Has(keeper) { // another rank is on its way with it, and may come to the key's server after the keeper's question
		residual, carrier, flags = n.handed.residual.Share(), keeper, flags|wire.FlagCopy
	}
	n.residual = nil
	n.handed.forget()
	return residual, carrier, flags
}

// carrier is who of the ranks there is to carry a residual from a server that leaves: one that pushes here, because the others do not wait for the server's goodbye, and a sum
// may close at the heir before they bring it; of those the keeper, in whose checkpoint it is. A keeper that does not push here asks elsewhere.
func (n *iterations) carrier(keeper int, there rankset.Set) int {
	if here := n.here.Overlap(there); here.Len() > 0 {
		there = here
	}
	if there.Has(keeper) {
		return keeper
	}
	return there.Ranks()[0]
}

// carry has a rank carry a residual to where the key is.
func (k *key) carry(residual *room.Buffer, to room.Reply, flags wire.Flags) {
	if residual != nil {
		h := k.residualHeader()
		h.Flags = k.AnswerFlags() | flags
		to.To.Send(h, residual.Bytes, residual, to.Priority)
	}
}

// residualHeader is that of a frame with a residual; without one that says that what its rank has brought is here.
func (k *key) residualHeader() wire.Header {
	return wire.Header{Type: wire.TypeResidual, DType: units.Float32, Tensor: k.ID, Part: k.Number}
}

// moved tells a rank that its push, or what it has supplied, is for another server.
func (k *key) moved(a *answer) {
	k.carry(a.carries, a.to, 0)
	if k.Number == 0 {
		k.Shell.Forget(a.seq)
	}
	a.to.Confirm(wire.Header{Type: wire.TypeMoved, Tensor: k.ID, Part: k.Number, Iteration: a.iteration, Seq: a.seq, Source: a.source})
}

// sendAway does that for what has not been taken, and of which no home server knows. A residual goes back with its bytes.
func (k *key) sendAway(q *room.Request) error {
	switch q.Type {
	case wire.TypeResidual:
		return k.inherit(q)
	case wire.TypePush:
		var residual *room.Buffer
		k.mu.Lock()
		if k.iterations.left { // its rank is about to hear that, and behind that what it carries
			k.mu.Unlock()
			return nil
		}
		away, answers := k.iterations.elsewhere()
		if away {
			residual = k.iterations.handOn()
		}
		k.iterations.sentAway(q.From())
		k.mu.Unlock()
		k.deliver(answers)
		k.carry(residual, q.Reply, 0)
	}
	q.Moved()
	return nil
}

// inherit adds a residual that a rank has carried from another server.
func (k *key) inherit(q *room.Request) error {
	if !k.Round.Elastic {
		return fmt.Errorf("%v of %q, in a job that is not elastic", q.Type, k.Name)
	}
	err := k.coded(q)
	if err != nil {
		return err
	}
	if n, want := q.Payload.Len(), k.Answers.ResidualBytes(k.Coding.Elements); n != want || n == 0 {
		return fmt.Errorf("%d bytes for the residual of partition %d of %q, want %d", n, k.Number, k.Name, want)
	}
	b, err := q.Payload.Lend(k.Round.Pool)
	if err != nil {
		return k.withoutResidual(err)
	}
	carried := room.NewBuffer(k.Round.Pool, b)
	k.mu.Lock()
	away, answers := k.iterations.elsewhere()
	left := k.iterations.left
	if !away && !left {
		k.iterations.here.Add(q.From())
	}
	switch {
	case away || left:
	case q.Has(wire.FlagCopy):
		k.iterations.keepCopy(carried, q.From())
	default:
		err = k.iterations.addResidual(carried)
	}
	k.mu.Unlock()
	k.deliver(answers)
	switch {
	case away: // its rank is to carry it on
		k.carry(carried, q.Reply, q.Flags&wire.FlagCopy)
	case left: // its rank is about to hear that, and brings it to the heir
		carried.Sent(nil)
	default:
		q.Reply.Confirm(k.residualHeader())
		return k.withoutResidual(err)
	}
	return nil
}

// withoutResidual says that there is no memory for a residual that a rank has brought. Another error is returned.
func (k *key) withoutResidual(err error) error {
	if !errors.As(err, new(room.MemoryError)) {
		return err
	}
	k.Round.Log.Warn("a residual is lost: the next answer comes without what earlier ones lacked", zap.String("tensor", k.Name), zap.Uint32("partition", k.Number), zap.Error(err))
	return nil
}

// addResidual takes over what a residual has, and its memory.
func (n *iterations) addResidual(carried *room.Buffer) error {
	if n.residual == nil && !n.GivenUp() {
		n.residual = carried
		n.handed.forget()
		return nil
	}
	defer carried.Sent(nil)
	if n.GivenUp() {
		return nil
	}
	residual, err := n.ownResidual()
	if err == nil {
		reduce.Add(units.Sum, units.Float32, residual, carried.Bytes, 1)
	}
	return err
}

// keepCopy keeps a copy of a residual that another rank is on its way with, for the checkpoint of the rank that has brought it, unless it has come.
func (n *iterations) keepCopy(carried *room.Buffer, rank int) {
	if n.residual != nil || n.handed.residual != nil || n.GivenUp() {
		carried.Sent(nil)
		return
	}
	n.handed = handed{residual: carried, askers: rankset.Of(rank)}
}

// comeTooLate ends a push whose iteration is not here any more: it was given up, or the key has left while the push arrived.
func (k *key) comeTooLate(q *room.Request) {
	k.mu.Lock()
	left := k.iterations.left
	k.mu.Unlock()
	if left { // its rank is about to hear that, and pushes again
		return
	}
	if !k.Round.Elastic || k.Gone(q.Iteration) {
		q.Reply.Fail(inprocess.ErrCancelled)
		return
	}
	if k.Number == 0 {
		k.Shell.Forget(q.Seq)
	}
	_ = k.sendAway(q) // of a push it has no error
}
