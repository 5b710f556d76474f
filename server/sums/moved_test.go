package sums

import (
	"bytes"
	"testing"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// movable is the server of a coded key in an elastic job of two servers, of which this is the first. The key has a residual of threes.
func movable(t *testing.T) *play {
	p := newPlay(t, func(p *play, w *wire.Tensor) {
		p.shell.Elastic(t)
		w.Codec = "topk:0.5"
	})
	p.ranks[2] = &roomtest.Rank{Number: 2}
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

// residual checks what the key has: a checkpoint asks for it.
func (p *play) residual(want float32) {
	p.Helper()
	p.serve(0, wire.Header{Type: wire.TypeState}, nil)
	if got := p.took(0, wire.TypeResult)[0].Payload; want == 0 && len(got) > 0 || want != 0 && !bytes.Equal(got, roomtest.Floats(n, want)) {
		p.Errorf("the residual is %v, want %g", got, want)
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
		p.residual(0)
		p.serve(0, wire.Header{Type: wire.TypeRestore}, roomtest.Floats(n, 3))
		p.took(0, wire.TypeMoved)
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
	p.residual(0)
}
