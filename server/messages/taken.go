package messages

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// In an elastic job messages go on where the server that has a mailbox is lost (decision 127). Only the receiver knows whether the answer to its receive has come, so it passes that
// on to the sender, which keeps its message meanwhile. To the heir both bring what they wait for, and the receiver before that what it has heard of messages: one of them
// is not delivered again.

// entrust leaves it to the receiver of a message, in an elastic job, to tell the sender what it is told next, and reports whether it does.
func (x *Room) entrust(m *message, r *receive) bool {
	if !x.round.Elastic || r.reply.To == nil {
		return false
	}
	x.mu.Lock()
	gone := x.ended || x.gone.Has(m.to)
	if !gone {
		m.data = room.Payload{} // which has gone, or is not wanted
		x.untold[m.messageID] = m
	}
	x.mu.Unlock()
	if gone {
		m.answer(wire.Match{Outcome: wire.Departed, Sent: m.bytes})
	}
	h := r.header(m.from)
	h.Type = wire.TypeTaken
	r.reply.To.Send(h, wire.Taken{Number: m.number, Oldest: m.number - min(m.number, uint64(m.h.Before))}.Append(nil), nil, r.reply.Priority)
	return true
}

// taken passes on to the sender of a message what its receiver has heard of it: from here, or from a lost server.
func (x *Room) taken(q *room.Request) error {
	if !x.round.Elastic || q.Source == wire.EveryRank {
		return errors.New("what has become of a message of any rank, or in a job that is not elastic")
	}
	var match wire.Match
	if err := decode(q, &match); err != nil {
		return err
	}
	m, err := x.hear(&q.Header, match)
	if m != nil {
		m.answer(match)
	}
	return err
}

// hear finds the message that a receiver has heard of, or notes what it has heard until the message comes again.
func (x *Room) hear(h *wire.Header, match wire.Match) (*message, error) {
	id := idOf(h)
	x.mu.Lock()
	defer x.mu.Unlock()
	if m := x.untold[id]; m != nil {
		delete(x.untold, id)
		return m, nil
	}
	if m, waits := x.box(id.to).WithdrawMessage(id.from, h.Iteration, id.number); waits {
		x.refund(m, nil)
		return m, nil
	}
	if _, known := x.heard[id]; known || x.ended || x.gone.Has(id.from) {
		return nil, nil
	}
	if len(x.heard) == limits.MaxHeard {
		return nil, fmt.Errorf("rank %d has had more than %d messages of which their senders have not heard", id.to, limits.MaxHeard)
	}
	x.heard[id] = match
	return nil, nil
}

// hasHeard gives what the receiver of a message that comes again has heard of it. The caller holds the lock.
func (x *Room) hasHeard(m *message) (match wire.Match, again bool) {
	if match, again = x.heard[m.messageID]; again {
		delete(x.heard, m.messageID)
	}
	return match, again
}

// forget gives the messages to a rank that has gone whose senders have not been told, and forgets those of the rank. The caller holds the lock.
func (x *Room) forget(rank int) (untold []*message) {
	for id, m := range x.untold {
		if id.to == rank {
			untold = append(untold, m)
		}
		if id.to == rank || id.from == rank {
			delete(x.untold, id)
		}
	}
	for id := range x.heard {
		if id.to == rank || id.from == rank {
			delete(x.heard, id)
		}
	}
	return untold
}
