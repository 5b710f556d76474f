package worker

import (
	"fmt"
	"math"

	"github.com/paceline/paceline/core/mailbox"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// A message from one rank to another is two operations that nobody declares: a send and a receive. They are matched in the mailbox
// of the receiving rank (server/messages), which is on the server in its process where there is one. A send ends when its
// message has been received.
//
//  1. Both ask that server, each with one task, on its first connection or at once, so that what a rank submits keeps its
//     order. A short message is in the task (limits.MaxEager).
//  2. The answer to a receive is the message. That to a send is a match: the message was received, or its bytes are wanted.
//     Then they follow in pieces, as the partitions of a tensor do.

// AnyRank is the root of a receive that takes a message of any rank. Output.Value is the one that it was of.
const AnyRank = mailbox.Any

// asPieces is the declaration of all messages: none, which needs no announcement.
var asPieces = &declaration{state: declareDone}

// checkMessage finds what is wrong with one end of a message.
func (o *Op) checkMessage(rank int, bytes int64) error {
	memory, what := o.Input, "input"
	if o.Kind == units.Receive {
		memory, what = o.Output, "output"
	}
	switch {
	case o.Root == AnyRank && o.Kind == units.Receive:
	case o.member(o.Root) < 0:
		return fmt.Errorf("%s: that rank is not in process set %d %v", o.what(), o.Set.ID, o.Set.Ranks)
	}
	if o.member(rank) < 0 {
		return fmt.Errorf("%s: rank %d is not in process set %d %v", o.what(), rank, o.Set.ID, o.Set.Ranks)
	}
	if int64(len(memory)) != bytes {
		return fmt.Errorf("%s: %s of %d bytes for shape %v of %v, want %d", o.what(), what, len(memory), o.Shape, o.DType, bytes)
	}
	return nil
}

// what names the operation in errors.
func (o *Op) what() string {
	switch {
	case o.Kind == units.Send:
		return fmt.Sprintf("send to rank %d with %s", o.Root, o.tag())
	case o.Kind == units.Receive && o.Root == AnyRank:
		return "receive from any rank with " + o.tag()
	case o.Kind == units.Receive:
		return fmt.Sprintf("receive from rank %d with %s", o.Root, o.tag())
	}
	return fmt.Sprintf("%v of %q", o.Kind, o.name())
}

// tag is what the caller calls the tag of a message.
func (o *Op) tag() string {
	if o.Name != "" {
		return o.Name
	}
	return fmt.Sprintf("tag %d", o.Tag)
}

// registerMessage notes one end of a message.
func (b *book) registerMessage(op *Op) *operation {
	o := &operation{Op: *op, d: asPieces, beside: true, epoch: b.epoch().Joins, seq: b.messages.last}
	o.mu.Place(levelWorker, "operation")
	o.Shape = nil
	b.messages.last++
	b.messages.inFlight++
	if o.Kind == units.Send && b.epoch().Elastic {
		o.behind = uint32(min(o.seq-b.messages.sendsTo(o.Root).begin(o.seq), math.MaxUint32))
	}
	b.inflight[o] = struct{}{}
	return o
}

// messages are the ends of messages of this rank.
type messages struct {
	last     uint64
	inFlight int
	sends    map[int]*inFlight // in an elastic job: those in flight, by the rank that they are to
	had      map[int]*had      // and messages that this rank has had, by the rank that may wait to hear of it
}

// messageOver forgets one end of a message.
func (b *book) messageOver(o *operation) {
	b.messages.inFlight--
	if o.Kind == units.Send && b.epoch().Elastic {
		b.messages.sendsTo(o.Root).end(o.seq)
	}
}

// mailbox is the server that has the mailbox of a rank.
func (e *Engine) mailbox(rank int) int {
	epoch := e.epoch()
	if own := epoch.Embedded(rank); own >= 0 {
		return own
	}
	return rank % epoch.Founders() // the same for all ranks, whoever has heard of a join
}

// letter is a task of a message with what its frames have in common.
func (o *operation) letter(typ wire.Type) *task {
	src, dst := o.e.cfg.Rank, o.Root
	if o.Kind == units.Receive {
		src, dst = dst, src
	}
	t := &task{o: o, server: o.e.mailbox(dst), h: wire.Header{
		Type: typ, DType: o.DType, Epoch: o.epoch, Rank: uint16(o.e.cfg.Rank), Iteration: o.Tag, Seq: o.seq,
		Source: uint16(src), Destination: uint16(dst), // AnyRank is EveryRank
		Before: o.behind,
	}}
	if o.Authenticated {
		t.h.Flags = wire.FlagAuthenticated
	}
	return t
}

// send brings a message to its mailbox: whole if it is short or that is in this process, else what is to be known of it.
func (o *operation) send() { o.foremost(o.sending()) }

func (o *operation) sending() *task {
	t := o.letter(wire.TypeSend)
	t.in, t.answer = o.Input, true
	if _, local := t.way().(*localQueue); !local && len(o.Input) > limits.MaxEager {
		t.h.Type = wire.TypeOffer
		t.in = o.offer().Append(nil)
	}
	return t
}

// receive asks the rank's own mailbox for a message.
func (o *operation) receive() {
	t := o.letter(wire.TypeReceive)
	t.in, t.out, t.answer = wire.Receive{Bytes: uint64(len(o.Output))}.Append(nil), o.Output, true
	o.foremost(t)
}

// foremost runs a task before all else that waits for its server: priorities are for bytes.
func (o *operation) foremost(t *task) {
	o.urgency, o.Priority = o.Priority, math.MaxInt
	o.run([]*task{t}, nil)
}

// offer says into what pieces the message is cut.
func (o *operation) offer() wire.Offer {
	n := uint64(len(o.Input))
	step := max(n, 1)
	if n > limits.MaxEager {
		step = max(uint64(o.e.cfg.PartitionBytes), (n+limits.MaxParts-1)/limits.MaxParts)
	}
	return wire.Offer{Bytes: n, Step: step}
}

// sendPieces brings the bytes that are wanted to where they are. The answer to the first piece is that to all.
func (o *operation) sendPieces(at int32) {
	o.Priority = o.urgency
	offer := o.offer()
	tasks := make([]*task, offer.Pieces())
	for i := range tasks {
		t := o.letter(wire.TypePiece)
		from, to := offer.Piece(uint32(i))
		t.h.Part, t.in, t.answer = uint32(i), o.Input[from:to], i == 0
		t.elsewhere.Store(at)
		tasks[i] = t
	}
	o.run(tasks, nil)
}

// matched records what has become of a message, or of a receive that got none. The error is that of the operation.
func (t *task) matched(rank int, m wire.Match) error {
	sends := t.o.Kind == units.Send
	switch {
	case sends && m.Outcome == wire.Delivered:
		return nil
	case sends && m.Outcome == wire.Wanted && t.h.Type != wire.TypePiece && len(t.o.Input) > 0:
		at := t.elsewhere.Load()
		t.o.mu.Lock()
		t.o.next = func() { t.o.sendPieces(at) }
		t.o.mu.Unlock()
		return nil
	}
	return t.o.refused(rank, m)
}

// refused is the error of an end of a message that is not delivered. rank is the other end.
func (o *operation) refused(rank int, m wire.Match) error {
	other, does, receives := fmt.Sprint("rank ", rank), "receive", o.Kind == units.Receive
	if receives {
		if does = "send"; o.Root == AnyRank && m.Sent == 0 {
			other = "every other rank"
		}
	}
	sent, room := lengths(m)
	because := func(kind error, format string, args ...any) error {
		return because{kind, fmt.Sprintf("%s on rank %d: %s", o.what(), o.e.cfg.Rank, fmt.Sprintf(format, args...))}
	}
	switch m.Outcome {
	case wire.WrongLength:
		if receives {
			return because(ErrMismatch, "there is room for %s, where %s sends %s; the message is dropped", room, other, sent)
		}
		return because(ErrMismatch, "it has %s, where %s receives %s; it is dropped", sent, other, room)
	case wire.Withdrawn:
		return because(ErrUnsupported, "%s has given up its %s", other, does)
	case wire.Departed:
		return because(ErrPeerLost, "%s has left, or was lost", other)
	case wire.NoMemory:
		return because(ErrMemory, "the server that has the mailbox of the receiving rank has no memory for %d bytes: raise PACELINE_SERVER_MEMORY", max(m.Sent, m.Room))
	case wire.Untagged:
		switch {
		case m.SentAs == m.RoomAs:
		case receives:
			return because(ErrMismatch, "it is for %s, which a receiver may interpret, and %s sends %s: receive the type that is sent", room, other, sent)
		default:
			return because(ErrMismatch, "it has %s, and %s receives %s, which a receiver may interpret: receive the type that is sent", sent, other, room)
		}
		return because(ErrMismatch, "its bytes are interpreted by the receiver, and %s does not send them as such (authenticated)", other)
	}
	return because(ErrUnsupported, "the server answers with outcome %d", m.Outcome)
}

// lengths are those of a message and of a receive that do not fit, with what they are elements of, where it is not bytes alone.
func lengths(m wire.Match) (sent, room string) {
	of := func(n uint64, d units.DType) string {
		if m.SentAs == units.Uint8 && m.RoomAs == units.Uint8 {
			return fmt.Sprintf("%d bytes", n)
		}
		return fmt.Sprintf("%d bytes (%d of %v)", n, n/uint64(d.Size()), d)
	}
	return of(m.Sent, m.SentAs), of(m.Room, m.RoomAs)
}

// withdraw abandons the tasks of this end of a message, and tells the mailbox. What the rank submits when it has heard that the
// operation has ended does not overtake that.
func (o *operation) withdraw(tasks []*task) {
	t := o.letter(wire.TypeWithdraw)
	t.h.Flags = 0
	w := t.way()
	if w == nil {
		return
	}
	effects := make([]life.Effects, len(tasks))
	w.withdraw(t.h, func() {
		for i, abandoned := range tasks {
			effects[i] = abandoned.step(life.Abandon)
		}
	})
	for i, abandoned := range tasks {
		abandoned.follow(o, false, nil, effects[i])
	}
}

// waitsFor says what an end of a message waits for.
func (o *operation) waitsFor() string {
	switch {
	case o.Kind == units.Send:
		return fmt.Sprintf("rank %d to receive it", o.Root)
	case o.Root == AnyRank:
		return "any rank to send it"
	}
	return fmt.Sprintf("rank %d to send it", o.Root)
}
