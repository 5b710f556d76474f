package sums

import (
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// passing is a room of an elastic job with a broadcast of rank 1, or an allgather.
func passing(t *testing.T, kind units.Kind) *play {
	p := newPlay(t, func(p *play, w *wire.Tensor) {
		p.shell.Round.Elastic = true
		*w = wire.Tensor{ID: 1, Name: "x", Kind: kind, DType: units.Uint8, Parts: []uint32{4, 0}}
		if kind == units.Broadcast {
			w.Root = 1
		} else {
			w.Parts = []uint32{24, 8, 8}
		}
	})
	p.ranks[2] = &roomtest.Rank{Number: 2}
	return p
}

// TestWhatIsForwardedIsNotLent: an honest worker does not.
func TestWhatIsForwardedIsNotLent(t *testing.T) {
	for _, kind := range []units.Kind{units.Broadcast, units.Allgather} {
		p := passing(t, kind)
		q := &room.Request{
			Header:  wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Int64, Rank: 1},
			Payload: room.Lasting(make([]byte, 4)), Reply: room.Reply{Done: func(wire.Header, error) {}},
		}
		if err := p.room.Serve(q); err == nil {
			t.Errorf("%v in place is taken", kind)
		}
	}
}

func (p *play) pass(rank int, h wire.Header, payload []byte) {
	p.Helper()
	if payload == nil {
		h.Flags |= wire.FlagEmpty
	}
	h.Tensor, h.DType = 1, units.Int64
	if err := p.room.Serve(p.ranks[rank].Request(h, payload, len(payload))); err != nil {
		p.Error(err)
	}
}

// has checks the one answer that a rank has got since the last call.
func (p *play) has(rank int, payload []byte) {
	p.Helper()
	answers := p.ranks[rank].Take()
	if len(answers) != 1 || answers[0].Err != nil || !slices.Equal(answers[0].Payload, payload) {
		p.Errorf("rank %d gets %+v, want %v", rank, answers, payload)
	}
}

func TestABroadcastIsWhatItsRootHasBrought(t *testing.T) {
	p := passing(t, units.Broadcast)
	for iteration := range uint64(2) {
		data := []byte{1, 2, 3, byte(iteration)}
		push := wire.Header{Type: wire.TypePush, Iteration: iteration}
		p.pass(0, push, nil)
		p.pass(1, push, data)
		p.waits(0)
		p.pass(2, push, nil)
		for rank := range p.ranks {
			p.has(rank, data)
		}
	}
}

// Rank 0 has it, and the others lack it, one of them the root.
func TestABroadcastIsSupplied(t *testing.T) {
	p := passing(t, units.Broadcast)
	data := []byte{1, 2, 3, 4}
	push := wire.Header{Type: wire.TypePush, Iteration: 5}
	p.pass(2, push, nil)
	p.pass(0, wire.Header{Type: wire.TypeSupply, Iteration: 5}, data)
	p.has(2, data)
	p.pass(1, push, data)
	p.has(1, data)
}

// All who are left come to the same end: the broadcast, where its root has brought all before it went, or an error.
func TestABroadcastEndsAlikeOnAllRanksWhereItsRootGoes(t *testing.T) {
	for _, brought := range []bool{false, true} {
		p := passing(t, units.Broadcast)
		push := wire.Header{Type: wire.TypePush}
		p.pass(0, push, nil)
		if brought {
			p.pass(1, push, []byte{1, 2, 3, 4})
		}
		p.shell.HasLeft = rankset.Of(1)
		p.room.UpdateMembership()
		p.pass(2, push, nil)
		said := p.shell.Said()
		switch {
		case !brought && (len(said) != 1 || !strings.Contains(said[0], "its root, rank 1, has gone before all had what it gives")):
			t.Errorf("%q", said)
		case brought:
			p.has(0, []byte{1, 2, 3, 4})
			p.has(2, []byte{1, 2, 3, 4})
		}
	}
}

// The partition with which ranks say that they have it needs no root.
func TestThatAllHaveABroadcastIsKnownWithoutItsRoot(t *testing.T) {
	p := passing(t, units.Broadcast)
	p.shell.HasLeft = rankset.Of(1)
	push := wire.Header{Type: wire.TypePush, Part: 1}
	p.pass(0, push, nil)
	p.waits(0)
	p.pass(2, push, nil)
	p.has(0, nil)
	p.has(2, nil)
}

func TestAnAllgatherIsWhatEachRankHasBroughtInTheirOrder(t *testing.T) {
	p := passing(t, units.Allgather)
	push := wire.Header{Type: wire.TypePush, Part: 1}
	p.pass(2, push, []byte{7, 8, 9})
	p.pass(0, push, []byte{1})
	p.pass(1, push, nil)
	for rank := range p.ranks {
		p.has(rank, wire.Rows{{1}, nil, {7, 8, 9}}.Append(nil))
	}
	push.Iteration = 3 // it was not needed for those between
	p.pass(1, push, make([]byte, 1000))
	p.pass(2, push, nil)
	p.shell.HasLeft = rankset.Of(0)
	p.room.UpdateMembership()
	for _, rank := range []int{1, 2} {
		p.has(rank, wire.Rows{nil, make([]byte, 1000), nil}.Append(nil))
	}
}

// What a lost rank alone has brought, because it alone knew of longer rows, is forgotten when the others go on.
func TestRowsThatOnlyALostRankHasBroughtAreForgotten(t *testing.T) {
	for _, first := range []bool{false, true} {
		p := passing(t, units.Allgather)
		push := wire.Header{Type: wire.TypePush, Part: 1, Iteration: 1}
		p.pass(0, push, make([]byte, 1<<20))
		lose := func() {
			p.shell.HasLeft = rankset.Of(0)
			p.room.UpdateMembership()
		}
		if first {
			lose()
		}
		push.Iteration = 3
		p.pass(1, push, []byte{1})
		if !first {
			lose()
		}
		p.pass(2, push, []byte{2})
		for _, rank := range []int{1, 2} {
			p.has(rank, wire.Rows{nil, {1}, {2}}.Append(nil))
		}
		if lent := p.shell.Round.Pool.Lent(); lent >= 1<<20 {
			t.Errorf("lost before the others go on: %v: %d bytes are kept", first, lent)
		}
	}
}

func TestWhatIsNoneOfARanksToPassOnIsAnError(t *testing.T) {
	for name, c := range map[string]struct {
		kind  units.Kind
		rank  int
		flags wire.Flags
		bytes int
	}{
		"bytes of another than the root": {units.Broadcast, 0, 0, 4},
		"nothing of the root":            {units.Broadcast, 1, wire.FlagEmpty, 0},
		"other bytes than are declared":  {units.Broadcast, 1, 0, 5},
		"a message of a codec":           {units.Allgather, 1, 0, 5},
	} {
		p := passing(t, c.kind)
		h := wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Int64, Flags: c.flags}
		if c.kind == units.Allgather {
			h.Part, h.Codec = 1, wire.CodecDeclared
		}
		if err := p.room.Serve(p.ranks[c.rank].Request(h, make([]byte, c.bytes), c.bytes)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// What has more bytes than a frame may have fails on every rank before memory is taken for it.
func TestAnAllgatherThatIsTooLongIsAnErrorOnEveryRank(t *testing.T) {
	s := &slot{Part: &room.Part{Tensor: &room.Tensor{Tensor: wire.Tensor{Ranks: []int{0, 1}}}, Gathers: true}}
	huge := make([]byte, limits.MaxPayload/2)
	s.contributions = map[int][]byte{0: huge, 1: huge}
	if err := s.gather(rankset.Of(0, 1)); err == nil || !strings.Contains(err.Error(), "limit 1073741824") {
		t.Error(err)
	}
}
