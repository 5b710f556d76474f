package sums

import (
	"errors"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// What a key does in an elastic job that has been moved to another server while this one lives (decision 99): from one moment on it sends away all that comes for
// it, and what has come and was not answered. A result that a rank has supplied here that rank brings to the other server.

// errElsewhere is of a push that comes after that moment.
var errElsewhere = errors.New("the key has been moved to another server")

// elsewhere looks where the key is, if there is a new epoch, and empties the key where it has left: what is returned is to be sent away.
func (n *iterations) elsewhere() (away bool, answers []answer) {
	if !n.Round.Elastic {
		return false, nil
	}
	now := n.Round.Membership.Now()
	if now == n.epoch {
		return n.away, nil
	}
	was := n.away
	n.epoch, n.away = now, n.Elsewhere(n.Number)
	if !n.away || was {
		return n.away, nil
	}
	for iteration, s := range n.slots {
		if s.supplied {
			s.waiters = append(s.waiters, s.supplier)
		}
		for _, w := range s.waiters {
			answers = append(answers, answer{to: w.to, moved: true, iteration: iteration, seq: w.seq, source: w.source})
		}
	}
	n.cancel(0)
	if err := n.start(0); err != nil { // as a key that has never been here, if it comes back
		answers = append(answers, answer{refused: err})
	}
	return true, answers
}

// moved tells a rank that its push, or what it has supplied, is for another server.
func (k *key) moved(a *answer) {
	if k.Number == 0 {
		k.Shell.Forget(a.seq)
	}
	a.to.Confirm(wire.Header{Type: wire.TypeMoved, Tensor: k.ID, Part: k.Number, Iteration: a.iteration, Seq: a.seq, Source: a.source})
}

// sendAway does that for a push that has not been taken.
func (k *key) sendAway(q *room.Request) error {
	if err := q.Payload.Discard(); err != nil {
		return err
	}
	k.comeTooLate(q)
	return nil
}

// comeTooLate ends a push whose iteration is not here any more: it was given up, or the key has left while the push arrived.
func (k *key) comeTooLate(q *room.Request) {
	if !k.Round.Elastic || k.Gone(q.Iteration) {
		q.Reply.Fail(inprocess.ErrCancelled)
		return
	}
	if k.Number == 0 {
		k.Shell.Forget(q.Seq)
	}
	q.Moved()
}
