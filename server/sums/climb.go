package sums

import (
	"errors"
	"time"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// climb is the way of one sum of a host to the key's server and back. Meanwhile the iteration is closed, and its ranks wait. A slot that
// is used again has its climb, too; one that was given up with its sum on the way is not.
type climb struct {
	push    func(h wire.Header, sum []byte)
	abandon func()

	begun     bool
	empty     bool // there are only zeros, which are not sent
	iteration uint64
}

// climbOf makes a slot's climb.
func (k *key) climbOf(s *slot) (push func(wire.Header, []byte), abandon func()) {
	return k.Climbs(func(answer wire.Header, err error) { k.climbed(s, answer, err) })
}

// climb sends the sum of the host's ranks on. The answer replaces it.
func (k *key) climb(s *slot) {
	h := wire.Header{
		Type: wire.TypePush, Flags: k.AnswerFlags(), DType: k.Type, Tensor: k.ID, Part: k.Number, Iteration: s.up.iteration, Seq: s.seq,
		Source: uint16(s.last),
	}
	if s.up.empty {
		h.Flags |= wire.FlagEmpty
	}
	s.up.push(h, s.result.Bytes)
	k.Round.Hosts.Kick()
}

// climbed answers the host's ranks, with the same bytes that the other hosts get.
func (k *key) climbed(s *slot, answer wire.Header, err error) {
	k.mu.Lock()
	iteration, result := s.up.iteration, s.result
	switch {
	case k.iterations.slots[iteration] != s: // it was given up meanwhile
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
	answers, n.answers, n.now = n.answers, nil, time.Now()
	s.up.begun, s.up.empty = false, false
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
