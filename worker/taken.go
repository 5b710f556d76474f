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

// inFlight are the numbers of sends to one rank that have not ended.
type inFlight struct {
	from []uint64            // the oldest, and all after it, ended or not
	over map[uint64]struct{} // of them
}

// begin adds a number, and gives the oldest.
func (f *inFlight) begin(number uint64) uint64 {
	f.from = append(f.from, number)
	return f.from[0]
}

func (f *inFlight) end(number uint64) {
	f.over[number] = struct{}{}
	for len(f.from) > 0 {
		if _, over := f.over[f.from[0]]; !over {
			return
		}
		delete(f.over, f.from[0])
		f.from = f.from[1:]
	}
}

func (m *messages) sendsTo(rank int) *inFlight {
	f := m.sends[rank]
	if f == nil {
		if m.sends == nil {
			m.sends = map[int]*inFlight{}
		}
		f = &inFlight{over: map[uint64]struct{}{}}
		m.sends[rank] = f
	}
	return f
}

// had are the messages of one rank that this rank has had, and that rank may wait to hear of.
type had struct {
	oldest   uint64 // number that it may
	messages []taken
}

// taken is a message that this rank has had, or the match that it had in its place.
type taken struct {
	tag, number uint64
	match       wire.Match
}

// frame says so to the server that has this rank's mailbox.
func (t *taken) frame(from, to uint16) outbox.Frame {
	h := wire.Header{Type: wire.TypeMatch, Rank: to, Iteration: t.tag, Seq: t.number, Source: from, Destination: to}
	return outbox.Encoded(h, t.match)
}

// takes notes the message that an answer is about to bring.
func (p *peer) takes(h *wire.Header, payload []byte) error {
	var m wire.Taken
	err := m.Decode(payload)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil && p.traffic.elastic {
		p.traffic.taken[idOf(h)] = m
	}
	return err
}

// tellSender has the sender of the message in an answer hear what has become of it.
func (p *peer) tellSender(h *wire.Header, match wire.Match) {
	if !p.traffic.elastic {
		return
	}
	id := idOf(h)
	p.mu.Lock()
	m, is := p.traffic.taken[id]
	delete(p.traffic.taken, id)
	p.mu.Unlock()
	if !is {
		return
	}
	t := taken{h.Iteration, m.Number, match}
	p.e.mu.Lock()
	p.e.messages.has(int(h.Rank), t, m.Oldest)
	p.e.mu.Unlock()
	p.control(t.frame(h.Rank, h.Destination))
}

// has notes a message that this rank has had, and forgets those of which its sender has heard.
func (m *messages) has(from int, t taken, oldest uint64) {
	of := m.had[from]
	if of == nil {
		if m.had == nil {
			m.had = map[int]*had{}
		}
		of = new(had)
		m.had[from] = of
	}
	if oldest > of.oldest {
		of.oldest = oldest
		of.messages = slices.DeleteFunc(of.messages, func(t taken) bool { return t.number < oldest })
	}
	of.messages = append(of.messages, t)
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
	for from, of := range p.e.messages.had {
		for _, t := range of.messages {
			frames = append(frames, t.frame(uint16(from), here.Destination))
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
		t.redirect(p.heir(t).(*peer).index)
		o.foremost(t)
	}
	o.mu.Unlock()
	piece.happened(life.Abandon)
}

// withdrawLate brings what was withdrawn since the connections to a lost server ended to its heir.
func (p *peer) withdrawLate() {
	p.mu.Lock()
	late := p.traffic.late
	p.traffic.late = nil
	p.mu.Unlock()
	for _, h := range late {
		p.withdraw(h, func() {})
	}
}
