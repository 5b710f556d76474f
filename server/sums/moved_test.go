package sums

import (
	"bytes"
	"testing"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// playCoded is the server of a coded key in an elastic job of two servers, of which this is the first.
func playCoded(t *testing.T) *play {
	p := newPlay(t, func(p *play, w *wire.Tensor) {
		p.shell.Elastic(t)
		w.Codec = "topk:0.5"
	})
	p.ranks[2] = &roomtest.Rank{Number: 2}
	return p
}

// movable is that of a key that has a residual of threes.
func movable(t *testing.T) *play {
	p := playCoded(t)
	p.serve(0, wire.Header{Type: wire.TypeRestore}, roomtest.Floats(n, 3))
	p.took(0, wire.TypeResult)
	return p
}

// coded pushes a message of ones.
func (p *play) coded(rank int, iteration uint64) {
	p.Helper()
	by, _ := codec.Parse("topk:0.5")
	message := make([]byte, by.MaxEncoded(n))
	message = message[:by.Encode(message, roomtest.Floats(n, 1), make([]byte, by.ResidualBytes(n)), codec.Stream{})]
	p.serve(rank, wire.Header{Type: wire.TypePush, Codec: wire.CodecDeclared, Iteration: iteration, Seq: iteration}, message)
}

// took checks the types of what a rank has got, in their order, and returns it.
func (p *play) took(rank int, want ...wire.Type) []roomtest.Answer {
	p.Helper()
	answers := p.ranks[rank].Take()
	for i, a := range answers {
		if i >= len(want) || a.Type != want[i] {
			p.Fatalf("rank %d gets %v, want %v", rank, answers, want)
		}
	}
	if len(answers) < len(want) {
		p.Fatalf("rank %d gets %v, want %v", rank, answers, want)
	}
	return answers
}

// residual checks what the key has: a checkpoint of rank 0 asks for it.
func (p *play) residual(want float32) {
	p.Helper()
	p.serve(0, wire.Header{Type: wire.TypeState}, nil)
	if got := p.took(0, wire.TypeResult)[0].Payload; want == 0 && len(got) > 0 || want != 0 && !bytes.Equal(got, roomtest.Floats(n, want)) {
		p.Errorf("the residual is %v, want %g", got, want)
	}
}

// noResidual checks what a rank gets, instead of a residual, that asks for that.
func (p *play) noResidual(rank int, want ...wire.Type) {
	p.Helper()
	p.serve(rank, wire.Header{Type: wire.TypeState}, nil)
	p.took(rank, want...)
}

// lent checks whether the server has memory of a residual.
func (p *play) lent(want bool) {
	p.Helper()
	if got := p.shell.Round.Pool.Lent(); got > 0 != want {
		p.Errorf("%d bytes are lent, want any: %v", got, want)
	}
}

// The residual of a key that is moved goes with one push that is sent away, ahead of that.
func TestTheResidualGoesWithOnePush(t *testing.T) {
	for _, early := range []bool{true, false} { // the push comes before the move, or after
		p := movable(t)
		if early {
			p.coded(1, 0)
		}
		p.shell.MoveTo(t, 1)
		if !early {
			p.residual(3) // it stays until there is one
			p.coded(1, 0)
		}
		p.room.UpdateMembership()
		if got := p.took(1, wire.TypeResidual, wire.TypeMoved); !bytes.Equal(got[0].Payload, roomtest.Floats(n, 3)) {
			t.Errorf("rank 1 carries %v", got[0])
		}
		p.coded(2, 0)
		p.took(2, wire.TypeMoved)
		p.residual(3) // of rank 0 alone, whose checkpoint may be under way: there is no other before it pushes
		p.noResidual(1, wire.TypeMoved)
		p.serve(0, wire.Header{Type: wire.TypeRestore}, roomtest.Floats(n, 3))
		p.took(0, wire.TypeMoved)
		p.coded(0, 0)
		p.took(0, wire.TypeMoved)
		p.noResidual(0, wire.TypeMoved)
		p.lent(false)
	}
}

// The residual that was handed on stays for checkpoints, in the memory of what is on its way, until its rank has pushed or gone, or there is another one: also where the key
// comes back before the residual.
func TestARankThatHasNotPushedFindsTheResidual(t *testing.T) {
	for end, test := range map[string]func(*play){
		"it pushes": func(p *play) {
			p.coded(0, 0)
			p.took(0, wire.TypeMoved)
		},
		"it has gone": func(p *play) {
			p.shell.HasLeft = rankset.Of(0)
			p.room.UpdateMembership()
		},
		"the server leaves": func(p *play) {
			p.room.Leave(func(rank int) room.Sender { return p.ranks[rank] })
			p.noResidual(0)
		},
		"the tensor is given up": func(p *play) { p.cancel(0) },
		"the key and its residual come back": func(p *play) {
			p.shell.MoveTo(t, 0)
			p.residual(3)
			p.serve(1, wire.Header{Type: wire.TypeResidual}, roomtest.Floats(n, 3))
			p.took(1, wire.TypeResidual)
			p.residual(3)
			p.lent(true)
			p.shell.MoveTo(t, 1)
			p.coded(0, 0)
			p.took(0, wire.TypeResidual, wire.TypeMoved)
			p.coded(1, 0)
			p.took(1, wire.TypeMoved)
			p.coded(2, 0)
			p.took(2, wire.TypeMoved)
		},
		"the key comes back, and its residual is lost": func(p *play) {
			p.shell.MoveTo(t, 0)
			p.residual(3)
			for rank := range p.ranks {
				p.coded(rank, 0)
			}
			for rank := range p.ranks {
				p.took(rank, wire.TypeResult)
			}
			p.serve(0, wire.Header{Type: wire.TypeState}, nil)
			if got := p.took(0, wire.TypeResult)[0].Payload; !bytes.Equal(got, roomtest.Floats(n, 0)) {
				p.Errorf("after an answer that lacks nothing the residual is %v", got)
			}
			p.cancel(0)
		},
	} {
		t.Run(end, func(t *testing.T) {
			p := movable(t)
			p.shell.MoveTo(t, 1)
			p.coded(1, 0)
			p.took(1, wire.TypeResidual, wire.TypeMoved)
			p.coded(2, 0)
			p.took(2, wire.TypeMoved)
			p.residual(3)
			p.lent(true)
			test(p)
			p.lent(false)
		})
	}
}

// What a rank has carried is added to what has come before, and goes back where the key is not here.
func TestACarriedResidualIsAdded(t *testing.T) {
	p := movable(t)
	p.serve(1, wire.Header{Type: wire.TypeResidual}, roomtest.Floats(n, 4))
	if got := p.took(1, wire.TypeResidual); len(got[0].Payload) > 0 {
		t.Errorf("rank 1 gets %v, not the word that it is here", got[0])
	}
	p.residual(7)
	p.shell.MoveTo(t, 1)
	p.serve(2, wire.Header{Type: wire.TypeResidual}, roomtest.Floats(n, 5))
	if got := p.took(2, wire.TypeResidual); !bytes.Equal(got[0].Payload, roomtest.Floats(n, 5)) {
		t.Errorf("rank 2 gets %v back", got[0])
	}
	p.shell.MoveTo(t, 0) // nobody has pushed meanwhile
	p.residual(7)
	q := p.ranks[1].Request(wire.Header{Type: wire.TypeResidual, Tensor: 1}, roomtest.Floats(n-1, 4), 0)
	if err := p.room.Serve(q); err == nil {
		t.Error("half a residual is taken")
	}
}

// A rank that has never pushed here may go past this server: it asks where it pushes, and nothing is kept for it.
func TestNothingIsKeptForRanksThatGoPast(t *testing.T) {
	p := movable(t) // rank 0 has brought the residual
	p.shell.MoveTo(t, 1)
	p.coded(0, 0)
	p.took(0, wire.TypeResidual, wire.TypeMoved)
	p.lent(false)
	p.noResidual(1, wire.TypeMoved)
}

// A key that has been moved from a server which then leaves sends nothing away any more: on another connection that would overtake the residual, and the rank push at the key's
// server without it.
func TestAServerThatLeavesSendsNothingAway(t *testing.T) {
	p := movable(t)
	p.shell.MoveTo(t, 1)
	p.room.Leave(func(rank int) room.Sender { return p.ranks[rank] })
	p.took(0, wire.TypeResidual)
	for rank := range p.ranks {
		h := wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float32, Codec: wire.CodecDeclared}
		if err := p.room.SendAway(p.ranks[rank].Request(h, nil, 0)); err != nil {
			t.Fatal(err)
		}
		p.took(rank)
	}
}

// A server that is about to leave has one rank carry the residual, and answers nothing any more of such a key: its heir is pushed all that it has not answered.
func TestResidualsOfAServerThatLeavesAreCarried(t *testing.T) {
	p := movable(t)
	p.coded(0, 0)
	p.room.Leave(func(rank int) room.Sender {
		if rank == 0 {
			return nil // it has no connection
		}
		return p.ranks[rank]
	})
	if got := p.took(1, wire.TypeResidual); !bytes.Equal(got[0].Payload, roomtest.Floats(n, 3)) || got[0].Flags&wire.FlagLast == 0 {
		t.Errorf("rank 1 carries %v", got[0])
	}
	p.coded(1, 0)
	p.coded(2, 0)
	p.serve(2, wire.Header{Type: wire.TypeRestore}, roomtest.Floats(n, 3))
	p.serve(2, wire.Header{Type: wire.TypeResidual}, roomtest.Floats(n, 3))
	for rank := range p.ranks {
		p.took(rank)
	}
	p.noResidual(0) // its heir may have one
}

// A server that leaves gives the rank whose checkpoint has a residual, which another rank carries, a copy. That is at the next server for that rank alone, and until the residual comes.
func TestACopyIsForOneCheckpoint(t *testing.T) {
	p := movable(t)
	keeper := p.w.Keeper(0)
	p.serve(keeper, wire.Header{Type: wire.TypeRestore}, roomtest.Floats(n, 3))
	p.took(keeper, wire.TypeResult)
	p.shell.MoveTo(t, 1)
	for rank := range p.ranks {
		if rank != keeper {
			p.coded(rank, 0)
			p.ranks[rank].Take()
		}
	}
	p.room.Leave(func(rank int) room.Sender { return p.ranks[rank] })
	if got := p.took(keeper, wire.TypeResidual)[0]; !bytes.Equal(got.Payload, roomtest.Floats(n, 3)) || got.Flags != wire.FlagLast|wire.FlagCopy {
		t.Errorf("its rank gets %v", got)
	}
	p.lent(false)

	next := playCoded(t)
	bring := func(rank int, flags wire.Flags, want int) {
		t.Helper()
		next.serve(rank, wire.Header{Type: wire.TypeResidual, Flags: flags}, roomtest.Floats(n, 3))
		if want == 0 {
			flags = 0
		}
		if got := next.took(rank, wire.TypeResidual)[0]; len(got.Payload) != want || got.Flags != flags {
			t.Errorf("rank %d gets %v, want %d bytes back", rank, got, want)
		}
	}
	next.shell.MoveTo(t, 1)
	bring(1, wire.FlagCopy, 4*n)
	next.shell.MoveTo(t, 0)
	bring(1, wire.FlagCopy, 0)
	next.residual(0) // rank 0 has none
	state := func() {
		t.Helper()
		next.serve(1, wire.Header{Type: wire.TypeState}, nil)
		if got := next.took(1, wire.TypeResult)[0].Payload; !bytes.Equal(got, roomtest.Floats(n, 3)) {
			t.Errorf("rank 1 has the residual %v", got)
		}
	}
	state()
	bring(2, 0, 0)
	next.residual(3)
	bring(1, wire.FlagCopy, 0) // too late
	state()
	next.residual(3)
}

// A rank that pushes elsewhere carries nothing, though its checkpoint has the residual: it does not wait for the server's goodbye before it pushes at the heir.
func TestARankThatPushesHereCarriesTheResidual(t *testing.T) {
	p := playCoded(t)
	keeper := p.w.Keeper(0)
	brings := (keeper + 1) % len(p.ranks)
	p.serve(brings, wire.Header{Type: wire.TypeResidual}, roomtest.Floats(n, 3))
	p.took(brings, wire.TypeResidual)
	p.coded(brings, 0)
	p.room.Leave(func(rank int) room.Sender { return p.ranks[rank] })
	p.took(keeper)
	p.took(brings, wire.TypeResidual)
}

// What comes for the first time to a server that has given everything away is for its heir, too: a residual of another server that has left before.
func TestAServerThatHasLeftTakesNoResidual(t *testing.T) {
	p := playCoded(t)
	p.shell.Round.Leaves.Store(true)
	p.serve(1, wire.Header{Type: wire.TypeResidual}, roomtest.Floats(n, 3))
	p.took(1) // it has it still
	p.noResidual(1)
	p.coded(0, 0)
	p.took(0)
	p.lent(false)
}

// Of a server that leaves the rank carries the residual in whose checkpoint it is: it asks the heir behind that.
func TestTheRankThatAsksForAResidualCarriesIt(t *testing.T) {
	for _, gone := range []bool{false, true} {
		p := movable(t)
		keeper, first := p.w.Keeper(0), 0
		if keeper == first {
			t.Fatal("choose another name: it is the first rank's anyway")
		}
		for rank := range p.ranks {
			p.coded(rank, 0)
		}
		for rank := range p.ranks {
			p.took(rank, wire.TypeResult)
		}
		p.room.Leave(func(rank int) room.Sender {
			if rank == keeper && gone {
				return nil
			}
			return p.ranks[rank]
		})
		carrier := keeper
		if gone {
			carrier = first
		}
		for rank := range p.ranks {
			if rank == carrier {
				p.took(rank, wire.TypeResidual)
			} else {
				p.took(rank)
			}
		}
	}
}
