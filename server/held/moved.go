package held

import (
	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// What a value does in an elastic job that has been moved to another server while this one lives (decision 113): at one moment it gives itself to every rank that
// has it, as it is, with what it covers. From then on it sends away all that comes for it, and what has come and was not answered. The ranks supply it to the other
// server, where it goes on as that of a lost one. All have the same, so that any of them may be lost.

// elsewhere looks where the value is, if there is a new epoch, and empties it where it has left: what is returned is to be sent. The caller holds the lock.
func (v *value) elsewhere() (away bool, replies []reply) {
	s := &v.state
	if s.inherited == nil || s.over {
		return false, nil
	}
	away, left := s.whereabouts.Look(v.Part)
	if !left {
		return away, nil
	}
	replies = s.leave()
	m, err := condition.New(v.Conditions())
	if err != nil { // it was made by these before
		m = s.machine
	}
	whereabouts, past := s.whereabouts, s.tally()
	*s = newReaders(v.Part, m, v.room.copies)
	s.whereabouts, s.past = whereabouts, past
	return true, replies
}

// leave gives the value away or, where it has not begun here, sends back what ranks have supplied of it; and what waits.
func (s *readers) leave() []reply {
	n := s.inherited
	replies := []reply{{kind: leaves}}
	if n.open {
		s.Round.Log.Info("a held value goes on at another server", zap.String("tensor", s.Name), zap.Uint32("partition", s.Number), zap.Uint64("iteration", s.machine.V()))
		replies = s.give(replies)
	}
	for _, r := range n.suppliers {
		replies = append(replies, reply{reader: r, kind: moves})
	}
	for _, r := range s.cancel() {
		r.drop(s.Round.Pool)
		replies = append(replies, reply{reader: r, kind: moves})
	}
	return replies
}

// give gives the value, in the accumulator's type, to every rank that has it.
func (s *readers) give(replies []reply) []reply {
	value, covers := room.NewBuffer(s.Round.Pool, s.acc), s.covering()
	s.acc, s.present = nil, false
	live := s.Live()
	for rank, to := range s.inherited.senders {
		if live.Has(rank) {
			r := reader{rank: rank, to: room.Reply{To: to}}
			replies = append(replies, reply{reader: r, kind: gives, answer: answer{bytes: value.Share()}, covers: covers})
		}
	}
	value.Sent(nil)
	return replies
}

// left sends what is due in an elastic job beside answers, and reports whether it was that.
func (v *value) left(r *reply) bool {
	switch r.kind {
	case leaves:
		v.tuner.Swap(v.room.tuners.of(v.ProcessSet, v.Model, v.Round.Log)).release(v)
	case comes:
		tuner := v.room.tuners.of(v.ProcessSet, r.pull, v.Round.Log)
		if before := v.tuner.Swap(tuner); before != tuner {
			before.release(v)
		}
		v.deliver(tuner.watch(v))
	case moves:
		if r.has(wire.FlagHome) && r.h.Type != wire.TypeSupply {
			v.Shell.Forget(r.h.Seq)
		}
		r.to.Moved(r.h)
	case gives:
		h := wire.Header{Type: wire.TypeCover, Tensor: v.ID, Part: v.Number, Codec: wire.CodecSummed}
		r.to.To.Send(h, r.covers, nil, r.to.Priority)
		h.Type, h.Flags, h.DType = wire.TypeSupply, v.AnswerFlags()|r.leaving, v.Type
		r.to.To.Send(h, r.bytes.Bytes, r.bytes, r.to.Priority)
	default:
		return false
	}
	return true
}
