package sums

import (
	"errors"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// climb is the way of one sum of a host to the key's server and back. Meanwhile the iteration is closed, and its ranks wait.
type climb struct {
	begun   bool
	empty   bool   // there are only zeros, which are not sent
	abandon func() // nil until it has left, and when it is back
}

// climb sends the sum of the host's ranks on. The answer replaces it.
func (k *key) climb(s *slot, iteration uint64) {
	h := wire.Header{Type: wire.TypePush, Flags: k.AnswerFlags(), DType: k.Type, Tensor: k.ID, Part: k.Number, Iteration: iteration, Seq: s.seq}
	if s.up.empty {
		h.Flags |= wire.FlagEmpty
	}
	result := s.result
	abandon := k.Push(h, result.Bytes, func(answer wire.Header, err error) { k.climbed(s, iteration, result, answer, err) })
	k.Round.Hosts.Kick()
	k.mu.Lock()
	gone := k.iterations.slots[iteration] != s || s.result != result
	if !gone {
		s.up.abandon = abandon
	}
	k.mu.Unlock()
	if gone {
		abandon()
	}
}

// climbed answers the host's ranks, with the same bytes that the other hosts get.
func (k *key) climbed(s *slot, iteration uint64, result *room.Buffer, answer wire.Header, err error) {
	k.mu.Lock()
	switch {
	case k.iterations.slots[iteration] != s || s.result != result: // it was given up meanwhile
		k.mu.Unlock()
		result.Sent(nil)
		return
	case err != nil:
		waiters := k.iterations.fall(iteration, s)
		seq := s.seq
		k.mu.Unlock()
		result.Sent(nil)
		for _, w := range waiters {
			w.to.Fail(inprocess.ErrCancelled)
		}
		if !errors.Is(err, inprocess.ErrCancelled) {
			k.Shell.Fail(seq, room.CodeOf(err), err.Error())
			k.Shell.Drop(iteration)
		}
		return
	}
	answers := k.iterations.climbed(iteration, s, answer)
	k.mu.Unlock()
	k.deliver(answers)
}

// climbed makes what has come back the result.
func (n *iterations) climbed(iteration uint64, s *slot, answer wire.Header) (answers []answer) {
	answers, n.answers = n.answers, nil
	s.up = climb{}
	s.divisor, s.last = uint32(answer.Divisor), int(answer.Rank)
	if answer.Flags&wire.FlagEmpty != 0 {
		s.result.Bytes = s.result.Bytes[:0]
	}
	return n.answerAll(iteration, s, answers)
}

// fall takes an iteration out that has no result.
func (n *iterations) fall(iteration uint64, s *slot) (waiters []waiter) {
	delete(n.slots, iteration)
	n.trim()
	return s.waiters
}
