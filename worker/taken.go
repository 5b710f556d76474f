package worker

import (
	"slices"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// What the ranks of an elastic job do so that messages go on where the server is lost that has a mailbox (decision 127). A send ends when the receiver has told its sender, through
// the server, that it has the message. The heir of the mailbox hears from the receiver which messages it has had, before what it still wants to receive; and from each
// sender, in their order, of the messages that have not ended.

// taken is a message that this rank has had, or the match that it had in its place.
type taken struct {
	h     wire.Header // of the frame that says so
	match wire.Match
}

// takes notes the message that an answer is about to bring.
func (p *peer) takes(h *wire.Header, payload []byte) error {
	m := new(wire.Taken)
	if err := m.Decode(payload); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if t := p.traffic.answers[idOf(h)]; t != nil {
		t.taken = m
	}
	return nil
}

// tellSender has the sender of a message hear what has become of it. from is the sender.
func (p *peer) tellSender(t *task, from int, match wire.Match) {
	if t.taken == nil {
		return
	}
	had := taken{match: match, h: wire.Header{
		Type: wire.TypeMatch, Rank: t.h.Rank, Iteration: t.h.Iteration, Seq: t.taken.Number, Source: uint16(from), Destination: t.h.Destination,
	}}
	p.e.mu.Lock()
	p.e.messages.has(from, had, t.taken.Oldest)
	p.e.mu.Unlock()
	p.control(outbox.Encoded(had.h, match))
}

// has notes a message that this rank has had, and forgets those of which its sender has heard.
func (m *messages) has(from int, had taken, oldest uint64) {
	if m.had == nil {
		m.had = map[int][]taken{}
	}
	m.had[from] = append(slices.DeleteFunc(m.had[from], func(t taken) bool { return t.h.Seq < oldest }), had)
}

// bringMailbox tells the heir of a lost server which had this rank's mailbox of the messages that this rank has had.
func (p *peer) bringMailbox() {
	here := wire.Header{Destination: uint16(p.e.cfg.Rank)}
	w := p.e.wayTo(p.e.mailbox(p.e.cfg.Rank))
	for at, reached := w.(*peer); reached && at.gone(); at, reached = w.(*peer) {
		w = at.heirFor(asPieces, &here)
	}
	if w != way(p) {
		return
	}
	var frames []outbox.Frame
	p.e.mu.Lock()
	for _, had := range p.e.messages.had {
		for _, m := range had {
			frames = append(frames, outbox.Encoded(m.h, m.match))
		}
	}
	p.e.mu.Unlock()
	heir := p.heirFor(asPieces, &here).(*peer)
	for _, f := range frames {
		heir.control(f)
	}
}

// offerAgain has the send that a piece is of begin again at the heir of its mailbox, in its turn.
func (p *peer) offerAgain(piece *task) {
	o := piece.o
	o.mu.Lock()
	o.next = func() {
		t := o.sending()
		t.elsewhere.Store(int32(p.heir(t).(*peer).index + 1))
		o.foremost(t)
	}
	o.mu.Unlock()
	piece.happened(life.Abandon)
}
