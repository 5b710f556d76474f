package held

import (
	"bytes"
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// movable is the server of a value in an elastic job of two servers, of which this is the first.
func movable(t *testing.T, model string, change func(*wire.Tensor)) *play {
	p := heir(t, model, change)
	p.shell.Elastic(t)
	return p
}

// took checks the types of what a rank has got, in their order, and returns it.
func (p *play) took(rank int, want ...wire.Type) []roomtest.Answer {
	p.Helper()
	var got []wire.Type
	answers := p.ranks[rank].Take()
	for _, a := range answers {
		got = append(got, a.Type)
	}
	if !slices.Equal(got, want) {
		p.Fatalf("rank %d gets %v, want %v", rank, got, want)
	}
	return answers
}

// begins has every rank declare the value, ones.
func (p *play) begins() {
	p.Helper()
	p.push(0, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	for rank := 1; rank < 3; rank++ {
		p.pull(rank, wire.FlagDeclare)
	}
	for rank := range p.ranks {
		p.took(rank, wire.TypeCover, wire.TypeResult)
	}
}

// At one moment every rank gets the value with what it covers; what has not been answered then, and what comes later, is sent away.
func TestAValueThatIsMovedIsGivenToEveryRank(t *testing.T) {
	p := movable(t, "ssp:1", nil)
	p.begins()
	p.use(0, 1, 10)
	p.took(0) // it leads by one
	p.use(1, 1, 20)
	p.took(1)
	p.shell.MoveTo(t, 1)
	p.room.UpdateMembership()
	want := covers(0, 0, 0)
	want.Ranks[0], want.Ranks[1] = wire.CoveredPushes{Rank: 0, Next: 2, Pushed: 2}, wire.CoveredPushes{Rank: 1, Next: 2, Pushed: 2}
	for rank, types := range [][]wire.Type{{wire.TypeCover, wire.TypeSupply, wire.TypeMoved}, {wire.TypeCover, wire.TypeSupply, wire.TypeMoved}, {wire.TypeCover, wire.TypeSupply}} {
		got := p.took(rank, types...)
		if !bytes.Equal(got[0].Payload, want.Append(nil)) || !bytes.Equal(got[1].Payload, roomtest.Floats(n, 31)) || got[1].Codec != wire.CodecSummed {
			t.Errorf("rank %d gets %v that covers %v", rank, got[1], got[0])
		}
	}
	p.use(2, 1, 40)
	if got := p.took(2, wire.TypeMoved); got[0].Seq != 1 {
		t.Errorf("the use that came later is sent away as %+v", got[0].Header)
	}
	p.pull(1, wire.FlagNow)
	p.took(1, wire.TypeMoved)
	p.supply(1, 5, covers(1, 1, 1))
	p.took(1, wire.TypeMoved)
	if said := p.shell.Said(); len(said) > 0 {
		t.Errorf("it says %q", said)
	}
	if p.room.Holds() {
		t.Error("a value that has left takes memory")
	}
}

// A value that has not begun here when it is moved on goes back to the ranks as they brought it.
func TestWhatAValueHasNotBegunWithIsSentBack(t *testing.T) {
	p := movable(t, "asp", nil)
	p.supply(0, 5, covers(2, 2, 1))
	p.use(0, 2, 1)
	p.use(1, 2, 1)
	p.shell.MoveTo(t, 1)
	p.room.UpdateMembership()
	if got := p.took(0, wire.TypeMoved, wire.TypeMoved); got[0].Seq != 0 || got[1].Seq != 2 {
		t.Errorf("rank 0 gets %+v", got)
	}
	p.took(1, wire.TypeMoved)
	p.took(2)

	q := movable(t, "asp", nil)
	q.serve(0, wire.Header{Type: wire.TypePush, DType: units.Float32, Flags: wire.FlagDeclare | wire.FlagHome, Seq: 4}, roomtest.Floats(n, 1))
	q.shell.MoveTo(t, 1)
	q.room.UpdateMembership()
	q.took(0, wire.TypeMoved)
	if said := q.shell.Said(); !slices.Equal(said, []string{"forget 4"}) { // its rank comes to it at the other server
		t.Errorf("of a declaration that is sent away it says %q", said)
	}
}

// A value that comes back goes on from what its ranks supply, and from nothing that was here before.
func TestAValueComesBack(t *testing.T) {
	p := movable(t, "asp", func(w *wire.Tensor) { w.Prescale, w.Postscale = 1, 3 })
	p.begins()
	p.shell.MoveTo(t, 1)
	p.room.UpdateMembership()
	for rank := range p.ranks {
		p.took(rank, wire.TypeCover, wire.TypeSupply)
	}
	p.shell.MoveTo(t, 0)
	for rank := range p.ranks {
		p.serve(rank, wire.Header{Type: wire.TypeCover}, covers(4, 1, 1).Append(nil))
		p.serve(rank, wire.Header{Type: wire.TypeSupply, DType: units.Float32, Codec: wire.CodecSummed}, roomtest.Floats(n, 7))
	}
	p.use(1, 1, 10)
	p.gets(1, 3*17, wire.Cover{Closed: 1, Ranks: []wire.CoveredPushes{{Rank: 0, Next: 4, Pushed: 4}, {Rank: 1, Next: 2, Pushed: 2}, {Rank: 2, Next: 1, Pushed: 1}}})
}

// A server that is about to leave gives its values away at once, and takes nothing any more.
func TestValuesOfAServerThatLeavesAreGiven(t *testing.T) {
	p := movable(t, "ssp:1", nil)
	p.begins()
	p.use(0, 1, 10)
	p.room.Leave(nil)
	for rank := range p.ranks {
		got := p.took(rank, wire.TypeCover, wire.TypeSupply)
		if !bytes.Equal(got[1].Payload, roomtest.Floats(n, 11)) || got[1].Flags&wire.FlagLast == 0 {
			t.Errorf("rank %d gets %v", rank, got[1])
		}
	}
	p.use(0, 2, 10)
	p.use(1, 1, 10)
	for rank := range p.ranks {
		p.took(rank)
	}
}

// With the first value of a group the decider leaves: what ranks report goes to the one beside the value.
func TestTheDeciderLeavesWithItsValue(t *testing.T) {
	p := movable(t, "adaptive:1,1", nil)
	p.begins()
	report := func(rank int, empty wire.Flags) {
		h := wire.Header{Type: wire.TypeReport, Flags: wire.FlagHome | wire.FlagAsk | empty, Rank: uint16(rank)}
		if err := p.room.Report(&h, wire.Report{Iteration: 1}); err != nil {
			t.Error(err)
		}
	}
	report(0, 0)
	p.shell.Said()
	p.shell.MoveTo(t, 1)
	p.room.UpdateMembership()
	for rank := range p.ranks {
		p.took(rank, wire.TypeCover, wire.TypeSupply)
	}
	for rank := range p.ranks {
		report(rank, 0)
		report(rank, wire.FlagEmpty)
	}
	if said := p.shell.Said(); len(said) > 0 {
		t.Errorf("a decider that has left says %q", said)
	}
	if p.room.decider != nil {
		t.Error("the decider stays behind")
	}
	p.shell.MoveTo(t, 0)
	report(0, 0)
	if d := p.room.decider; d == nil || d.machine.Superstep() != 0 {
		t.Errorf("where the value comes back there is the decider %+v", d)
	}
}
