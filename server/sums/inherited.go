package sums

import (
	"errors"
	"fmt"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// What a key does in an elastic job that has come from a lost server: core/handover decides.

// supply accepts the result of an iteration that a lost server gave to a rank.
func (k *key) supply(q *room.Request) error {
	if err := k.supplies(q); err != nil {
		return err
	}
	b, err := q.Payload.Lend(k.Round.Pool)
	if err != nil {
		return k.unread(q, err)
	}
	k.mu.Lock()
	away, answers := k.iterations.elsewhere()
	kept := false
	if !away {
		answers, kept = k.iterations.supplied(q, b)
	}
	k.mu.Unlock()
	if !kept {
		k.Round.Pool.Put(b)
	}
	k.deliver(answers)
	if away {
		q.Moved()
	}
	return nil
}

// supplies checks what a supplied result says of its payload, before memory is taken for it.
func (k *key) supplies(q *room.Request) error {
	n, fits := q.Payload.Len(), false
	switch {
	case !k.Round.Elastic || q.DType != k.Type:
	case q.Has(wire.FlagEmpty):
		fits = n == 0
	case k.Gathers:
		fits = q.Codec == wire.CodecPlain
	case k.Coding == nil:
		fits = n == k.Bytes && q.Codec == wire.CodecPlain
	default:
		fits = q.Codec == wire.CodecDeclared && n <= k.Answers.MaxEncoded(k.Coding.Elements)
	}
	if !fits {
		return fmt.Errorf("%d bytes of %v in encoding %d are no result of partition %d of %q", n, q.DType, q.Codec, q.Part, k.Name)
	}
	return nil
}

// reach goes on to an iteration that a rank has begun: those before it are closed somewhere.
func (n *iterations) reach(iteration uint64) error {
	if iteration <= n.machine.V() {
		return nil
	}
	if err := n.start(iteration); err != nil {
		return err
	}
	for i, s := range n.slots {
		if i < iteration && !s.closed {
			n.inherited.Reached(i, s.came)
		}
	}
	n.forgetLost()
	return nil
}

// start has the machine begin anew at an iteration.
func (n *iterations) start(iteration uint64) error {
	m, err := condition.New(condition.Config{Start: iteration, Live: n.machine.Live(), Model: n.Model, Dataflow: n.Dataflow()})
	if err == nil {
		n.machine = m
	}
	return err
}

// lacks answers a push of an iteration that is closed elsewhere when its result is here.
func (n *iterations) lacks(s *slot, q *room.Request, answers []answer) []answer {
	s.owed++
	s.waiters = append(s.waiters, waiter{rank: q.From(), seq: q.Seq, to: q.Reply, came: n.now})
	if n.inherited.Pushed(q.From(), q.Iteration, n.machine.Live()) {
		answers = n.sum(q.Iteration, answers)
	}
	return n.misses(q.Iteration, s, answers)
}

// sum closes an iteration that every live rank lacks. A lost rank may have had its result: that is forgotten.
func (n *iterations) sum(iteration uint64, answers []answer) []answer {
	by := n.inherited.By(iteration)
	n.inherited.Found(iteration)
	s := n.slots[iteration]
	if s == nil {
		return answers
	}
	answers = n.close(condition.Output{Kind: condition.Advance, Progress: iteration, Contributors: by}, answers)
	return n.answerAll(iteration, s, answers)
}

// answerAll answers all who wait for an iteration that was closed.
func (n *iterations) answerAll(iteration uint64, s *slot, answers []answer) []answer {
	for n.slots[iteration] == s && s.closed && len(s.waiters) > 0 {
		answers = n.answer(condition.Output{Rank: s.waiters[0].rank, Progress: iteration}, answers)
	}
	return answers
}

// supplied makes what a rank supplies the result of an iteration, unless that has one, and reports whether it keeps the memory.
func (n *iterations) supplied(q *room.Request, result []byte) (answers []answer, kept bool) {
	if n.Gone(q.Iteration) {
		return nil, false
	}
	if err := n.reach(q.Iteration + 1); err != nil {
		return []answer{{refused: err, seq: q.Seq}}, false
	}
	s := n.slots[q.Iteration]
	if s != nil && s.closed {
		s.absent.Remove(q.From())
		n.release(q.Iteration, s)
		return nil, false
	}
	if s == nil {
		s = newSlot(n.Part)
		s.seq = q.Seq
		n.slots[q.Iteration] = s
	} else {
		s.drop()
		s.acc = nil
	}
	s.closed, s.divisor, s.last = true, uint32(q.Divisor), q.From()
	s.result = room.NewBuffer(n.Round.Pool, result)
	s.supplied, s.supplier = true, waiter{rank: q.From(), seq: q.Seq, to: q.Reply}
	s.absent = n.machine.Live().Minus(rankset.Of(q.From()))
	for _, w := range s.waiters {
		s.absent.Remove(w.rank)
	}
	for iteration, later := range n.slots {
		if iteration > q.Iteration {
			s.absent.Subtract(later.started)
		}
	}
	n.inherited.Found(q.Iteration)
	n.now = time.Now()
	answers = n.answerAll(q.Iteration, s, nil)
	n.release(q.Iteration, s)
	return answers, true
}

// passed forgets the results that were kept for ranks which have come to a later iteration.
func (n *iterations) passed(iteration uint64) {
	for i, s := range n.slots {
		if i < iteration && s.closed && s.owed == 0 && n.Model.Whole() {
			s.absent.Reset()
			n.release(i, s)
		}
	}
}

// errStraggler is of such a push.
var errStraggler = errors.New("its sum was lost")

// refuse tells the rank of a push whose iteration was closed without it by a server that is lost: with that went the sum.
func (k *key) refuse(q *room.Request) error {
	if err := q.Payload.Discard(); err != nil {
		return err
	}
	k.Shell.Refuse(q.From(), q.Seq, units.FailUnsupported, fmt.Sprintf("the sum of iteration %d, which was closed without this rank, was lost with its server", q.Iteration))
	q.Reply.Fail(inprocess.ErrCancelled)
	return nil
}
