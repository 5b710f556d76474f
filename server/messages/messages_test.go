package messages

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// play is a room under three ranks, the last of which is in this process. All messages have tag 7.
type play struct {
	*testing.T
	shell *roomtest.Shell
	room  *Room
	ranks [3]*roomtest.Rank
}

func newPlay(t *testing.T, memory int64) *play {
	p := &play{T: t, shell: roomtest.New(t, 3, memory)}
	p.room = New(&p.shell.Round)
	for i := range p.ranks {
		p.ranks[i] = &roomtest.Rank{Number: i, Local: i == 2}
	}
	t.Cleanup(func() {
		p.room.End(errors.New("the round is over"))
		p.shell.CheckMemory(t)
		if len(p.room.kept) > 0 || len(p.room.coming) > 0 {
			t.Errorf("%v is kept, %v is to come", p.room.kept, p.room.coming)
		}
	})
	return p
}

func (p *play) serve(rank int, typ wire.Type, from, to, number, part, out int, flags wire.Flags, payload []byte) error {
	p.Helper()
	h := wire.Header{Type: typ, Iteration: 7, Seq: uint64(number), Source: uint16(from), Destination: uint16(to), Part: uint32(part), Flags: flags}
	return p.room.Serve(p.ranks[rank].Request(h, payload, out))
}

func (p *play) must(err error) {
	p.Helper()
	if err != nil {
		p.Error(err)
	}
}

func (p *play) send(from, to, number int, text string) {
	p.Helper()
	p.must(p.serve(from, wire.TypeSend, from, to, number, 0, 0, 0, []byte(text)))
}

func (p *play) offer(from, to, number, bytes, step int) {
	p.Helper()
	p.must(p.serve(from, wire.TypeOffer, from, to, number, 0, 0, 0, wire.Offer{Bytes: uint64(bytes), Step: uint64(step)}.Append(nil)))
}

func (p *play) receive(to, from, number, bytes int) {
	p.Helper()
	p.must(p.serve(to, wire.TypeReceive, from, to, number, 0, bytes, 0, wire.Receive{Bytes: uint64(bytes)}.Append(nil)))
}

func (p *play) piece(from, to, number, part int, text string) error {
	p.Helper()
	return p.serve(from, wire.TypePiece, from, to, number, part, 0, 0, []byte(text))
}

func (p *play) withdraw(rank, from, to, number int) {
	p.Helper()
	p.must(p.serve(rank, wire.TypeWithdraw, from, to, number, 0, 0, 0, nil))
}

// hears checks what a rank has got since the last call: the bytes of a message with its source, or an outcome.
func (p *play) hears(rank int, want ...string) {
	p.Helper()
	var got []string
	for _, a := range p.ranks[rank].Take() {
		var match wire.Match
		var refused wire.Refusal
		switch {
		case errors.As(a.Err, &refused):
			got = append(got, fmt.Sprintf("%d: outcome %d", a.Rank, refused.Outcome))
		case a.Err != nil:
			got = append(got, a.Err.Error())
		case a.Type == wire.TypeResult:
			got = append(got, fmt.Sprintf("%d: %s", a.Rank, a.Payload))
		case p.ranks[rank].Local:
			got = append(got, fmt.Sprintf("%d: outcome 0", a.Rank))
		default:
			p.must(match.Decode(a.Payload))
			got = append(got, fmt.Sprintf("%d: outcome %d", a.Rank, match.Outcome))
		}
	}
	if !slices.Equal(got, want) {
		p.Errorf("rank %d hears %q, want %q", rank, got, want)
	}
}

const (
	delivered   = "outcome 0"
	wanted      = "outcome 1"
	wrongLength = "outcome 2"
	withdrawn   = "outcome 3"
	departed    = "outcome 4"
	noMemory    = "outcome 5"
	untagged    = "outcome 6"
)

func TestAMessageWaitsForItsReceiveAndAReceiveForItsMessage(t *testing.T) {
	p := newPlay(t, 1<<20)
	for receiver := range 3 { // from others' processes, from this one, and to oneself
		for sender := range 3 {
			p.send(sender, receiver, 1, "text")
			p.hears(sender)
			p.receive(receiver, sender, 2, 4)
			p.receive(receiver, sender, 3, 4)
			p.send(sender, receiver, 4, "more")
			if sender == receiver {
				p.hears(sender, fmt.Sprintf("%d: text", sender), fmt.Sprintf("%d: %s", sender, delivered), fmt.Sprintf("%d: more", sender), fmt.Sprintf("%d: %s", sender, delivered))
				continue
			}
			p.hears(receiver, fmt.Sprintf("%d: text", sender), fmt.Sprintf("%d: more", sender))
			p.hears(sender, fmt.Sprintf("%d: %s", receiver, delivered), fmt.Sprintf("%d: %s", receiver, delivered))
		}
	}
}

func TestAnOfferedMessageComesInPiecesOfAnyOrder(t *testing.T) {
	for _, receiver := range []int{1, 2} {
		p := newPlay(t, 1<<20)
		p.offer(0, receiver, 1, 8, 3)
		p.hears(0)
		p.receive(receiver, 0, 2, 8)
		p.hears(0, fmt.Sprint(receiver, ": ", wanted))
		p.must(p.piece(0, receiver, 1, 2, "gh"))
		p.must(p.piece(0, receiver, 1, 0, "abc"))
		p.hears(receiver)
		p.must(p.piece(0, receiver, 1, 1, "def"))
		p.hears(receiver, "0: abcdefgh")
		p.hears(0, fmt.Sprint(receiver, ": ", delivered))
	}
}

func TestPiecesThatAreNotToComeEndTheConnection(t *testing.T) {
	p := newPlay(t, 1<<20)
	p.offer(0, 2, 1, 8, 3)
	p.receive(2, 0, 1, 8)
	p.must(p.piece(0, 2, 1, 1, "def"))
	for _, err := range []error{
		p.piece(0, 2, 1, 1, "def"), p.piece(0, 2, 1, 3, "x"), p.piece(0, 2, 1, 0, "abcd"), p.piece(0, 2, 1, 2, "ghi"),
		p.serve(1, wire.TypePiece, 0, 2, 1, 0, 0, 0, []byte("abc")), p.serve(0, wire.TypeSend, 0, 3, 9, 0, 0, 0, nil), p.serve(0, wire.TypeReceive, 1, 2, 9, 0, 0, 0, nil),
		p.serve(0, wire.TypeWithdraw, 1, 2, 9, 0, 0, 0, nil), p.serve(0, wire.TypeOffer, 0, 2, 9, 0, 0, 0, []byte("short")),
	} {
		if err == nil {
			t.Error("a frame that cannot be is served")
		}
	}
	p.must(p.piece(0, 2, 5, 1, "of nothing"))
	p.must(p.piece(0, 2, 5, 0, "of nothing"))
	p.hears(0, "2: "+wanted, "2: "+withdrawn)
}

// breaksOff is a connection that ends amid a payload.
type breaksOff struct{}

func (breaksOff) ReadPayload([]byte) error { return io.ErrUnexpectedEOF }

func TestAMessageThatHasBrokenOffTakesNoPieces(t *testing.T) {
	p := newPlay(t, 1<<20)
	p.receive(2, 0, 1, 4)
	q := p.ranks[0].Request(wire.Header{Type: wire.TypeSend, Iteration: 7, Seq: 1, Source: 0, Destination: 2}, nil, 0)
	q.Payload = room.Stream(breaksOff{}, make([]byte, 4), 4)
	if err := p.room.Serve(q); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
	if p.piece(0, 2, 1, 0, "text") == nil {
		t.Error("a piece of a message that was sent whole is served")
	}
	p.hears(2)
	p.room.Leave(0)
	p.hears(2, "0: "+departed)
}

// What is kept of one rank for another is bounded: the bytes of further messages come again when they are wanted.
func TestMessagesBeyondTheBoundComeAgain(t *testing.T) {
	p := newPlay(t, 16<<20)
	text := strings.Repeat("x", limits.MaxEager)
	const fit = limits.MaxKeptMessages / limits.MaxEager
	for i := range fit + 2 {
		p.send(0, 2, i, text)
	}
	if lent := p.shell.Round.Pool.Lent(); lent > limits.MaxKeptMessages+(fit+2)*room.WaitingBytes {
		t.Errorf("%d bytes are kept", lent)
	}
	for i := range fit {
		p.receive(2, 0, i, limits.MaxEager)
		p.hears(0, "2: "+delivered)
		p.hears(2, "0: "+text)
	}
	p.receive(2, 0, fit, limits.MaxEager)
	p.hears(0, "2: "+wanted)
	p.must(p.piece(0, 2, fit, 0, text))
	p.hears(0, "2: "+delivered)
	p.hears(2, "0: "+text)
}

func TestWhatDoesNotFitIsAnErrorAtBothEnds(t *testing.T) {
	p := newPlay(t, 1<<20)
	p.send(0, 1, 1, "text")
	p.receive(1, 0, 1, 5)
	p.offer(1, 0, 2, 100, 10)
	p.receive(0, 1, 2, 99)
	p.hears(0, "1: "+wrongLength, "1: "+wrongLength)
	p.hears(1, "0: "+wrongLength, "0: "+wrongLength)
	p.must(p.serve(1, wire.TypeReceive, 0, 1, 3, 0, 4, wire.FlagAuthenticated, wire.Receive{Bytes: 4}.Append(nil)))
	p.send(0, 1, 4, "evil")
	p.hears(0, "1: "+untagged)
	p.hears(1, "0: "+untagged)
}

func TestWithoutMemoryAMessageFailsAtBothEnds(t *testing.T) {
	p := newPlay(t, 8<<10)
	p.offer(0, 1, 1, 64<<10, 1<<10) // it would have to lie here, for a receiver elsewhere
	p.receive(1, 0, 1, 64<<10)
	p.hears(0, "1: "+noMemory)
	p.hears(1, "0: "+noMemory)
	all, err := p.shell.Round.Pool.Get(8 << 10)
	if err != nil {
		t.Fatal(err)
	}
	p.send(0, 1, 2, "text")
	p.receive(1, 0, 2, 4)
	p.hears(0, "1: "+noMemory)
	p.hears(1, "0: "+noMemory)
	p.shell.Round.Pool.Put(all)
}

func TestWhatIsWithdrawnMeetsNobody(t *testing.T) {
	p := newPlay(t, 1<<20)
	p.send(0, 2, 1, "mine")
	p.withdraw(1, 1, 2, 1) // another's number
	p.withdraw(0, 0, 2, 1)
	p.withdraw(0, 0, 2, 1)
	p.hears(0, "2: "+withdrawn)
	p.receive(2, 0, 1, 4)
	p.withdraw(2, 0, 2, 1)
	p.hears(2, "0: "+withdrawn)
	p.send(0, 2, 2, "text")
	p.hears(0)
	p.receive(2, 0, 2, 4)
	p.hears(0, "2: "+delivered)
	p.hears(2, "0: text")

	for number, who := range []int{0, 2} { // while the bytes are on their way
		p.offer(0, 2, 10+number, 4, 2)
		p.receive(2, 0, 20+number, 4)
		p.hears(0, "2: "+wanted)
		p.must(p.piece(0, 2, 10+number, 1, "xt"))
		p.withdraw(who, 0, 2, []int{10, 21}[number])
		p.hears(0, "2: "+withdrawn)
		p.hears(2, "0: "+withdrawn)
		p.must(p.piece(0, 2, 10+number, 0, "te"))
		p.hears(0, "2: "+withdrawn)
	}
}

// A rank that goes leaves what it has sent whole. All else that is between it and others fails.
func TestARankThatGoesEndsWhatWaitsForIt(t *testing.T) {
	p := newPlay(t, 1<<20)
	p.send(0, 2, 1, "kept")
	p.offer(0, 2, 2, 9, 9)
	p.send(1, 0, 3, "never received")
	p.receive(1, 0, 4, 4)
	p.offer(0, 2, 5, 4, 2)
	p.room.Leave(0)
	p.hears(1, "0: "+departed, "0: "+departed)
	p.receive(2, 0, 1, 4)
	p.hears(2, "0: kept")
	p.receive(2, 0, 2, 4)
	p.hears(2, "0: "+departed)
	p.send(1, 0, 6, "late")
	p.hears(1, "0: "+departed)

	p.offer(1, 2, 7, 4, 2)
	p.receive(2, 1, 3, 4)
	p.must(p.piece(1, 2, 7, 1, "xt"))
	p.receive(2, wire.EveryRank, 4, 4)
	p.ranks[1].Take()
	p.room.Leave(1)
	p.hears(2, "0: "+departed, "1: "+departed)
	p.receive(2, wire.EveryRank, 5, 4)
	p.hears(2, "0: "+departed)
}

func TestTheEndOfTheRoundEndsWhatWaits(t *testing.T) {
	p := newPlay(t, 1<<20)
	p.receive(2, 0, 1, 4)
	p.send(2, 0, 2, "text")
	p.offer(0, 1, 3, 4, 2)
	p.receive(1, 0, 3, 4)
	p.room.End(inprocess.ErrCancelled)
	for _, a := range p.ranks[2].Take() {
		if !errors.Is(a.Err, inprocess.ErrCancelled) {
			t.Errorf("%+v", a)
		}
	}
	p.receive(2, 0, 4, 4)
	p.send(2, 0, 5, "text")
	p.hears(2, "0: "+departed, "0: "+departed)
}
