// Package messages has the mailboxes of ranks: what one rank sends to another until that receives it (core/mailbox says
// which receive takes which message). A rank's box is on the server in its own process, where there is one, so that the
// bytes cross a link once.
//
//  1. A short message comes whole (send). What nobody has asked for is kept, up to limits.MaxKeptMessages from one rank to
//     another; beyond that its bytes are dropped, and it is treated as an offer.
//  2. Of a longer one the server knows the length alone (offer). When a receive takes it, a match asks the sender for the
//     bytes, which come in pieces over all connections, straight into the receiver's tensor where that is in this process
//     (delivery.go).
//  3. A match tells both ends what has become of the message, so that an error is one at both; in an elastic job by the receiver (taken.go).
package messages

import (
	"fmt"
	"sync/atomic"

	"github.com/paceline/paceline/core/mailbox"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Room has the boxes of one round. Answers are given without its lock.
type Room struct {
	round *room.Round

	mu     lockorder.Mutex
	boxes  map[int]*mailbox.Box[*message, *receive] // by the rank that receives
	coming map[messageID]*delivery                  // matched, with bytes that are still to come
	kept   map[pair]int                             // bytes of messages that wait
	untold map[messageID]*message                   // that their receivers have been answered with, in an elastic job
	heard  map[messageID]wire.Match                 // what receivers have heard on a lost server, of messages that may come again
	gone   rankset.Set
	ended  bool

	moved atomic.Uint64 // bytes that have come in pieces
}

// messageID is a message by the count of its sender.
type messageID struct {
	pair
	number uint64
}

type pair struct{ from, to int }

// message is a message that has come, or that is offered.
type message struct {
	messageID
	h     wire.Header
	offer wire.Offer // how its bytes come, where they are not here
	bytes uint64
	here  bool         // its bytes are: in data while it waits
	data  room.Payload // in memory that lasts
	note  int          // what the memory limit is charged with while it waits
	reply room.Reply
}

// receive is what a rank has asked for.
type receive struct {
	h     wire.Header
	bytes uint64
	reply room.Reply
}

// New makes a room without messages.
func New(r *room.Round) *Room {
	x := &Room{
		round: r, boxes: map[int]*mailbox.Box[*message, *receive]{}, coming: map[messageID]*delivery{}, kept: map[pair]int{}, untold: map[messageID]*message{},
		heard: map[messageID]wire.Match{},
	}
	x.mu.Place(room.LevelMessages, "messages.Room.mu")
	return x
}

// Serve handles a frame of a message. An error is of a peer that does not keep to the protocol.
func (x *Room) Serve(q *room.Request) error {
	here := q.Source
	if q.Type == wire.TypeReceive || q.Type == wire.TypeMatch || q.Type == wire.TypeWithdraw && q.Destination == q.Rank {
		here = q.Destination
	}
	if size := x.size(); int(here) != q.From() || int(q.Destination) >= size || int(q.Source) >= size && q.Source != wire.EveryRank {
		return fmt.Errorf("%v from rank %d to rank %d, in a job of %d", q.Type, q.Source, q.Destination, size)
	}
	switch q.Type {
	case wire.TypeSend, wire.TypeOffer:
		return x.send(q)
	case wire.TypeReceive:
		return x.receive(q)
	case wire.TypePiece:
		return x.piece(q)
	case wire.TypeMatch:
		return x.taken(q)
	}
	x.withdraw(&q.Header)
	return nil
}

func (x *Room) size() int { return len(x.round.Membership.Now().Workers) }

// Moved is how many bytes have come in pieces.
func (x *Room) Moved() uint64 { return x.moved.Load() }

// idOf is the message that a header of its sender is of.
func idOf(h *wire.Header) messageID {
	return messageID{pair{int(h.Source), int(h.Destination)}, h.Seq}
}

// sourceOf is the source that a receive names.
func sourceOf(h *wire.Header) int {
	if h.Source == wire.EveryRank {
		return mailbox.Any
	}
	return int(h.Source)
}

// send brings a message to the receive that takes it, or has it wait.
func (x *Room) send(q *room.Request) error {
	m := &message{messageID: idOf(&q.Header), h: q.Header, bytes: uint64(q.Payload.Len()), here: true, reply: q.Reply}
	if m.offer = (wire.Offer{Bytes: m.bytes, Step: max(m.bytes, 1)}); q.Type == wire.TypeOffer {
		if err := decode(q, &m.offer); err != nil {
			return err
		}
		m.bytes, m.here = m.offer.Bytes, false
	}
	r, answer, fate := x.claim(m)
	data := &q.Payload
	if fate == mailbox.Waits {
		if kept, err := x.keep(m, data); err != nil || !kept {
			return err
		}
		data = &m.data
		r, answer, fate = x.put(m) // a receive may have come meanwhile
	}
	switch fate {
	case mailbox.Matched:
		return x.deliver(m, r, data)
	case mailbox.Gone:
		m.answer(answer)
	}
	return nil
}

// claim finds the receive that takes a message now, or the answer that it has without one.
func (x *Room) claim(m *message) (*receive, wire.Match, mailbox.Fate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.find(m)
}

// find is claim. The caller holds the lock.
func (x *Room) find(m *message) (r *receive, answer wire.Match, fate mailbox.Fate) {
	if answer, again := x.hasHeard(m); again {
		x.refund(m, nil)
		return nil, answer, mailbox.Gone
	}
	if r, matched := x.box(m.to).Claim(m.from, m.h.Iteration); matched {
		x.refund(m, r)
		x.await(m, r)
		return r, answer, mailbox.Matched
	}
	return nil, answer, mailbox.Waits
}

// put has a message wait, unless a receive takes it by now.
func (x *Room) put(m *message) (r *receive, answer wire.Match, fate mailbox.Fate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r, answer, fate = x.find(m)
	switch {
	case fate != mailbox.Waits:
	case x.ended || x.gone.Has(m.to):
		x.refund(m, nil)
		return nil, wire.Match{Outcome: wire.Departed, Sent: m.bytes}, mailbox.Gone
	default:
		x.box(m.to).Put(m.from, m.h.Iteration, m.number, m)
	}
	return r, answer, fate
}

// keep makes what is to be kept of a message last. Where there is no memory for the bytes they are dropped, and where there
// is none for the message either, it is refused.
func (x *Room) keep(m *message, p *room.Payload) (kept bool, err error) {
	if lasting, ok := p.InPlace(); ok {
		m.data = room.Lasting(lasting)
	} else if n := p.Len(); m.here && n > 0 {
		if m.here = x.mayKeep(m, n); m.here {
			data := make([]byte, n)
			if err := p.Into(data); err != nil {
				x.drop(m)
				return false, err
			}
			m.data = room.Memory(data)
			return true, nil
		}
	}
	if err := x.round.Pool.Charge(room.WaitingBytes); err != nil {
		m.answer(wire.Match{Outcome: wire.NoMemory, Sent: m.bytes})
		return false, nil
	}
	m.note = room.WaitingBytes
	return true, nil
}

// mayKeep reports whether so many bytes of a message may be kept, which then are charged.
func (x *Room) mayKeep(m *message, n int) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.kept[m.pair]+n > limits.MaxKeptMessages || x.round.Pool.Charge(room.WaitingBytes+n) != nil {
		return false
	}
	x.kept[m.pair] += n
	m.note = room.WaitingBytes + n
	return true
}

// drop forgets a message that does not come whole.
func (x *Room) drop(m *message) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.refund(m, nil)
}

// refund gives back what the memory limit was charged with for a message, or a receive, that waits no longer.
func (x *Room) refund(m *message, r *receive) {
	if r != nil {
		x.round.Pool.Refund(room.WaitingBytes)
	}
	if m == nil || m.note == 0 {
		return
	}
	x.round.Pool.Refund(m.note)
	if x.kept[m.pair] -= m.note - room.WaitingBytes; x.kept[m.pair] == 0 {
		delete(x.kept, m.pair)
	}
	m.note = 0
}

// receive takes a message for a rank, or has the rank wait for it.
func (x *Room) receive(q *room.Request) error {
	r := &receive{h: q.Header, reply: q.Reply}
	var asked wire.Receive
	if err := decode(q, &asked); err != nil {
		return err
	}
	if r.bytes = asked.Bytes; r.reply.Local() && uint64(len(r.reply.Out)) != r.bytes {
		return fmt.Errorf("a receive of %d bytes into %d", r.bytes, len(r.reply.Out))
	}
	if err := x.round.Pool.Charge(room.WaitingBytes); err != nil { // it may wait for good
		r.answer(mailbox.Any, wire.Match{Outcome: wire.NoMemory, Room: r.bytes})
		return nil
	}
	switch m, fate := x.match(r); fate {
	case mailbox.Matched:
		return x.deliver(m, r, &m.data)
	case mailbox.Gone:
		r.answer(sourceOf(&r.h), wire.Match{Outcome: wire.Departed, Room: r.bytes})
	}
	return nil
}

// match finds the message that a receive takes now, or has it wait.
func (x *Room) match(r *receive) (m *message, fate mailbox.Fate) {
	x.mu.Lock()
	defer x.mu.Unlock()
	m, fate = x.box(int(r.h.Destination)).Receive(sourceOf(&r.h), r.h.Iteration, r.h.Seq, r)
	if fate == mailbox.Waits && x.ended {
		x.box(int(r.h.Destination)).WithdrawReceive(sourceOf(&r.h), r.h.Iteration, r.h.Seq)
		fate = mailbox.Gone
	}
	if fate != mailbox.Waits {
		x.refund(m, r)
	}
	if fate == mailbox.Matched {
		x.await(m, r)
	}
	return m, fate
}

// withdraw gives up what the sender of a frame has sent or asked for.
func (x *Room) withdraw(h *wire.Header) {
	b, from, tag := int(h.Destination), sourceOf(h), h.Iteration
	sends, receives := h.Source == h.Rank, h.Destination == h.Rank // both, where a rank sends to itself
	x.mu.Lock()
	if sends {
		if m, ok := x.box(b).WithdrawMessage(from, tag, h.Seq); ok {
			x.refund(m, nil)
			x.mu.Unlock()
			m.answer(wire.Match{Outcome: wire.Withdrawn, Sent: m.bytes})
			return
		}
	}
	if receives {
		if r, ok := x.box(b).WithdrawReceive(from, tag, h.Seq); ok {
			x.refund(nil, r)
			x.mu.Unlock()
			r.answer(from, wire.Match{Outcome: wire.Withdrawn, Room: r.bytes})
			return
		}
	}
	over := x.fail(wire.Withdrawn, func(d *delivery) bool {
		return sends && d.m.messageID == idOf(h) || receives && d.r.h.Rank == h.Rank && d.r.h.Seq == h.Seq
	})
	x.mu.Unlock()
	x.settle(over)
}

// Leave notes that a rank has gone: what it offered went with it, what it sent is still received, and what others sent to
// it, or wait for from it alone, fails.
func (x *Room) Leave(rank int) {
	var messages []*message
	var receives []*receive
	x.mu.Lock()
	x.gone.Add(rank)
	for to, b := range x.boxes {
		went, failed := b.Leave(rank, func(m *message) bool { return !m.here })
		if to == rank {
			waited, asked := b.Empty()
			went, failed = append(went, waited...), append(failed, asked...)
		}
		messages, receives = append(messages, went...), append(receives, failed...)
	}
	over := x.fail(wire.Departed, func(d *delivery) bool { return d.m.from == rank || d.m.to == rank })
	x.refundAll(messages, receives)
	messages = append(messages, x.forget(rank)...)
	x.mu.Unlock()
	for _, m := range messages {
		m.answer(wire.Match{Outcome: wire.Departed, Sent: m.bytes})
	}
	for _, r := range receives {
		r.answer(sourceOf(&r.h), wire.Match{Outcome: wire.Departed, Room: r.bytes})
	}
	x.settle(over)
}

func (x *Room) refundAll(messages []*message, receives []*receive) {
	for _, m := range messages {
		x.refund(m, nil)
	}
	for _, r := range receives {
		x.refund(nil, r)
	}
}

// End ends what waits: operations of the worker in this process with err. Nobody brings pieces any more.
func (x *Room) End(err error) {
	var replies []room.Reply
	x.mu.Lock()
	x.ended = true
	for _, b := range x.boxes {
		messages, receives := b.Empty()
		x.refundAll(messages, receives)
		for _, m := range messages {
			replies = append(replies, m.reply)
		}
		for _, r := range receives {
			replies = append(replies, r.reply)
		}
	}
	for _, d := range x.coming {
		d.putBack(x.round.Pool)
		replies = append(replies, d.m.reply, d.r.reply)
	}
	clear(x.coming)
	for _, m := range x.untold {
		replies = append(replies, m.reply)
	}
	clear(x.untold)
	clear(x.heard)
	x.mu.Unlock()
	for _, r := range replies {
		r.Fail(err)
	}
}

// box finds or makes the box of a rank.
func (x *Room) box(of int) *mailbox.Box[*message, *receive] {
	b := x.boxes[of]
	if b == nil {
		b = mailbox.New[*message, *receive](of, x.size())
		for _, rank := range x.gone.Ranks() {
			b.Leave(rank, nil) // nothing is in it
		}
		x.boxes[of] = b
	}
	return b
}

// decode reads a payload of a fixed size.
func decode(q *room.Request, v interface{ Decode(b []byte) error }) error {
	data, err := q.Payload.Next(min(q.Payload.Len(), room.ChunkBytes))
	if err != nil {
		return err
	}
	return v.Decode(data)
}

// answer tells the sender what has become of its message.
func (m *message) answer(match wire.Match) {
	answer(m.reply, wire.Header{
		Type: wire.TypeMatch, Rank: m.h.Destination, Iteration: m.h.Iteration, Seq: m.h.Seq, Source: m.h.Source, Destination: m.h.Destination,
	}, match)
}

// answer tells the receiver that it gets no message, for a reason at the other end: a rank, or Any.
func (r *receive) answer(from int, match wire.Match) {
	h := r.header(from)
	h.Type = wire.TypeMatch
	answer(r.reply, h, match)
}

// header is that of the answer to a receive.
func (r *receive) header(from int) wire.Header {
	return wire.Header{
		Type: wire.TypeResult, Rank: uint16(max(from, 0)), Iteration: r.h.Iteration, Seq: r.h.Seq, Source: r.h.Source, Destination: r.h.Destination,
	}
}

func answer(to room.Reply, h wire.Header, match wire.Match) {
	switch {
	case to.To != nil:
		to.To.Send(h, match.Append(nil), nil, to.Priority)
	case to.Done == nil:
	case match.Outcome == wire.Delivered:
		to.Done(h, nil)
	default:
		to.Done(h, wire.Refusal{Match: match})
	}
}
