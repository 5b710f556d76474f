package messages

import (
	"testing"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// newElasticPlay is a play whose job is elastic: all ranks are in other processes.
func newElasticPlay(t *testing.T) *play {
	p := newPlay(t, 1<<20)
	p.shell.Round.Elastic = true
	p.ranks[2].Local = false
	return p
}

// has checks that a rank has got the message of a number, or an outcome in its place, and says so to its sender.
func (p *play) has(rank, from, number int, want string) {
	p.Helper()
	answers := p.ranks[rank].Take()
	var taken wire.Taken
	var match wire.Match
	if len(answers) != 2 || answers[0].Type != wire.TypeTaken {
		p.Fatalf("rank %d has %+v", rank, answers)
	}
	p.must(taken.Decode(answers[0].Payload))
	got := string(answers[1].Payload)
	if answers[1].Type == wire.TypeMatch {
		p.must(match.Decode(answers[1].Payload))
		got = "outcome " + string(rune('0'+match.Outcome))
	}
	if taken.Number != uint64(number) || got != want {
		p.Errorf("rank %d has %q of message %d, want %q of %d", rank, got, taken.Number, want, number)
	}
	p.say(rank, from, number, match)
}

func (p *play) say(rank, from, number int, match wire.Match) {
	p.Helper()
	p.must(p.serve(rank, wire.TypeMatch, from, rank, number, 0, 0, 0, match.Append(nil)))
}

func TestTheReceiverTellsTheSenderOfAnElasticJob(t *testing.T) {
	p := newElasticPlay(t)
	p.send(0, 1, 3, "text")
	p.receive(1, 0, 5, 4)
	p.offer(0, 1, 4, 4, 3)
	p.hears(0)
	p.has(1, 0, 3, "text")
	p.hears(0, "1: "+delivered)
	p.receive(1, 0, 6, 4)
	p.hears(0, "1: "+wanted)
	p.must(p.piece(0, 1, 4, 0, "lon"))
	p.must(p.piece(0, 1, 4, 1, "g"))
	p.hears(0)
	p.has(1, 0, 4, "long")
	p.hears(0, "1: "+delivered)
	p.send(0, 1, 7, "text")
	p.receive(1, 0, 8, 5)
	p.has(1, 0, 7, wrongLength)
	p.hears(0, "1: "+wrongLength)
}

// A receiver that is lost tells nobody. What it has got counts for nothing then.
func TestASenderHearsOfTheLossOfARankThatHasNotToldIt(t *testing.T) {
	p := newElasticPlay(t)
	p.send(0, 1, 3, "text")
	p.receive(1, 0, 5, 4)
	p.send(2, 1, 3, "text")
	p.room.Leave(2)
	p.room.Leave(1)
	p.hears(0, "1: "+departed)
	p.send(0, 1, 4, "text")
	p.hears(0, "1: "+departed)
	if lent := p.shell.Round.Pool.Lent(); lent != 0 {
		t.Errorf("%d bytes are in use", lent)
	}
}

// TestAMessageThatWasReceivedOnALostServerIsNotDeliveredAgain, whether its sender brings it to the heir before its receiver speaks of it, or later, or not at all.
func TestAMessageThatWasReceivedOnALostServerIsNotDeliveredAgain(t *testing.T) {
	p := newElasticPlay(t)
	p.send(0, 1, 3, "had")
	p.say(1, 0, 3, wire.Match{})
	p.hears(0, "1: "+delivered)
	p.say(1, 0, 4, wire.Match{Outcome: wire.WrongLength})
	p.say(1, 0, 4, wire.Match{Outcome: wire.WrongLength})
	p.send(0, 1, 4, "had")
	p.hears(0, "1: "+wrongLength)
	p.say(1, 0, 5, wire.Match{})
	p.receive(1, 0, 9, 4)
	p.send(0, 1, 6, "next")
	p.has(1, 0, 6, "next")
	if len(p.room.heard) != 1 {
		t.Errorf("%v is kept, want the one that the sender has not sent again", p.room.heard)
	}
	p.room.Leave(0)
	if len(p.room.heard) != 0 {
		t.Errorf("%v is kept for a rank that has gone", p.room.heard)
	}
	if err := p.serve(1, wire.TypeMatch, wire.EveryRank, 1, 9, 0, 0, 0, wire.Match{}.Append(nil)); err == nil {
		t.Error("what has become of a message of any rank is taken in")
	}
}

func TestWhatIsSaidOfMessagesIsBounded(t *testing.T) {
	p := newElasticPlay(t)
	for i := range limits.MaxHeard {
		p.say(1, 0, i, wire.Match{})
	}
	if err := p.serve(1, wire.TypeMatch, 0, 1, 1<<30, 0, 0, 0, wire.Match{}.Append(nil)); err == nil {
		t.Error("there is no limit")
	}
}

func TestAJobThatIsNotElasticHasNoWordOfReceivers(t *testing.T) {
	p := newPlay(t, 1<<20)
	if err := p.serve(1, wire.TypeMatch, 0, 1, 1, 0, 0, 0, wire.Match{}.Append(nil)); err == nil {
		t.Error("it is taken in")
	}
}
