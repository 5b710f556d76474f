package messages

import (
	"fmt"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// delivery is a message that a receive has taken, and whose bytes come in pieces, over any connection of its sender.
//
// Invariants: each piece is written once; nobody is answered, and lent memory is not put back, while one is being
// written; a delivery that has failed takes no further piece.
type delivery struct {
	m *message
	r *receive

	// Guarded by the room's lock.
	into    []byte // the receiver's tensor, or memory that is lent for a receiver in another process
	lent    bool
	came    []bool // pieces, of which
	left    int    // have not been written, and
	writing int    // are being written
	failed  wire.Outcome
}

// await has a message that was just matched wait for its bytes, where they are not here.
func (x *Room) await(m *message, r *receive) {
	if m.here || fits(m, r) != wire.Delivered {
		return
	}
	pieces := m.offer.Pieces()
	x.coming[m.messageID] = &delivery{m: m, r: r, into: r.reply.Out, came: make([]bool, pieces), left: pieces}
}

// fits is the outcome of a match as far as it is known before the bytes have moved.
func fits(m *message, r *receive) wire.Outcome {
	switch {
	case m.bytes != r.bytes:
		return wire.WrongLength
	case r.h.Flags&^m.h.Flags&wire.FlagAuthenticated != 0:
		return wire.Untagged
	}
	return wire.Delivered
}

// deliver brings a message that was matched to its receiver, or asks for its bytes. The error is that of reading them.
func (x *Room) deliver(m *message, r *receive, data *room.Payload) (err error) {
	match := wire.Match{Outcome: fits(m, r), Sent: m.bytes, Room: r.bytes, SentAs: m.h.DType, RoomAs: r.h.DType}
	switch {
	case match.Outcome == wire.Delivered && m.here:
		if match.Outcome, err = x.hand(m, r, data); match.Outcome == wire.Delivered {
			return err
		}
	case match.Outcome == wire.Delivered:
		x.ask(m, r)
		return nil
	}
	told := x.entrust(m, r)
	if r.answer(m.from, match); !told {
		m.answer(match)
	}
	return err
}

// hand gives a receiver the bytes of a message that are here, and answers both. If they cannot be read, the sender is lost, and
// both wait for the reason.
func (x *Room) hand(m *message, r *receive, data *room.Payload) (wire.Outcome, error) {
	h := r.header(m.from)
	h.Flags = m.h.Flags & wire.FlagAuthenticated
	if r.reply.Local() {
		if err := data.Into(r.reply.Out); err != nil {
			return x.linger(m, r), err
		}
		r.reply.Done(h, nil)
		m.answer(wire.Match{Outcome: wire.Delivered, Sent: m.bytes, Room: r.bytes})
		return wire.Delivered, nil
	}
	if m.bytes > limits.MaxPayload { // of the worker in this process to one without a server
		return wire.NoMemory, nil
	}
	b, err := x.round.Pool.Get(int(m.bytes))
	if err != nil {
		return wire.NoMemory, nil
	}
	if err := data.Into(b); err != nil {
		x.round.Pool.Put(b)
		return x.linger(m, r), err
	}
	x.forward(m, r, b)
	return wire.Delivered, nil
}

// linger has a message that has broken off wait, with its receive, for the loss of its sender, unless that is known.
func (x *Room) linger(m *message, r *receive) wire.Outcome {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.ended || x.gone.Has(m.from) {
		return wire.Departed
	}
	x.coming[m.messageID] = &delivery{m: m, r: r, left: 1}
	return wire.Delivered
}

// forward sends a receiver in another process the bytes of a message. Its sender is answered when they have left, or the receiver has them.
func (x *Room) forward(m *message, r *receive, b []byte) {
	h := r.header(m.from)
	h.Flags = m.h.Flags & wire.FlagAuthenticated
	told := x.entrust(m, r)
	r.reply.To.Send(h, b, &forwarded{room.NewBuffer(x.round.Pool, b), m, told}, r.reply.Priority)
}

// forwarded is a message on its way to another process.
type forwarded struct {
	*room.Buffer
	m    *message
	told bool // its sender is, by others
}

// Sent implements room.Owner. Where the receiver is lost, and the job with it, the sender hears of that.
func (f *forwarded) Sent(err error) {
	f.Buffer.Sent(err)
	if err == nil && !f.told {
		f.m.answer(wire.Match{Outcome: wire.Delivered, Sent: f.m.bytes, Room: f.m.bytes})
	}
}

// ask has the sender of a message bring its bytes, once there is memory for them.
func (x *Room) ask(m *message, r *receive) {
	if !r.reply.Local() && !x.lend(m) {
		return
	}
	m.answer(wire.Match{Outcome: wire.Wanted, Sent: m.bytes, Room: r.bytes})
}

// lend lends memory for a message to a receiver in another process, and reports whether that is still wanted. Where there
// is none, the message fails.
func (x *Room) lend(m *message) bool {
	var b []byte
	err := fmt.Errorf("%d bytes, limit %d", m.bytes, limits.MaxPayload)
	if m.bytes <= limits.MaxPayload {
		b, err = x.round.Pool.Get(int(m.bytes))
	}
	x.mu.Lock()
	d := x.coming[m.messageID] // nil where it has failed since it was matched
	var over []*delivery
	switch {
	case err != nil:
		over = x.fail(wire.NoMemory, func(other *delivery) bool { return other == d })
	case d == nil:
		x.round.Pool.Put(b)
	default:
		d.into, d.lent = b, true
	}
	x.mu.Unlock()
	x.settle(over)
	return err == nil && d != nil
}

// piece writes a piece of a message to its receiver's memory. One of a message that nobody waits for any more is left, and
// its sender told with the first of them.
func (x *Room) piece(q *room.Request) error {
	id := idOf(&q.Header)
	x.mu.Lock()
	d := x.coming[id]
	if d == nil || d.failed != 0 {
		x.mu.Unlock()
		if q.Part == 0 {
			(&message{h: q.Header, reply: q.Reply}).answer(wire.Match{Outcome: wire.Withdrawn})
		}
		return nil
	}
	from, to := d.m.offer.Piece(q.Part)
	wrong := d.into == nil || from == to || int(to-from) != q.Payload.Len() || d.came[q.Part] || d.m.h.Flags&^q.Flags&wire.FlagAuthenticated != 0
	if !wrong {
		d.came[q.Part] = true
		d.writing++
	}
	x.mu.Unlock()
	if wrong {
		return fmt.Errorf("piece %d of %d bytes, with flags %#x, of a message of %d bytes in pieces of %d with flags %#x: not one of those that are to come",
			q.Part, q.Payload.Len(), uint16(q.Flags), d.m.bytes, d.m.offer.Step, uint16(d.m.h.Flags))
	}
	err := q.Payload.Into(d.into[from:to])
	x.moved.Add(to - from)
	x.mu.Lock()
	if d.writing--; err == nil { // else the sender is lost: what has broken off waits for the reason
		d.left--
	}
	over := d.writing == 0 && (d.left == 0 || d.failed != 0)
	if over {
		delete(x.coming, id)
	}
	x.mu.Unlock()
	if over {
		x.settle([]*delivery{d})
	}
	return err
}

// fail ends deliveries, and gives those that nobody writes to, which the caller settles.
func (x *Room) fail(why wire.Outcome, which func(*delivery) bool) (over []*delivery) {
	for id, d := range x.coming {
		if d.failed != 0 || !which(d) {
			continue
		}
		if d.failed = why; d.writing == 0 {
			delete(x.coming, id)
			over = append(over, d)
		}
	}
	return over
}

// settle tells both ends of deliveries how they ended.
func (x *Room) settle(over []*delivery) {
	for _, d := range over {
		match := wire.Match{Outcome: d.failed, Sent: d.m.bytes, Room: d.r.bytes}
		switch {
		case d.failed != 0:
			d.putBack(x.round.Pool)
			d.r.answer(d.m.from, match)
		case d.lent:
			x.forward(d.m, d.r, d.into)
			continue
		default:
			d.r.reply.Done(d.header(), nil)
		}
		d.m.answer(match)
	}
}

// header is that of the result.
func (d *delivery) header() wire.Header {
	h := d.r.header(d.m.from)
	h.Flags = d.m.h.Flags & wire.FlagAuthenticated
	return h
}

func (d *delivery) putBack(pool *mempool.Pool) {
	if d.lent {
		pool.Put(d.into)
		d.lent, d.into = false, nil
	}
}
