package sums

import (
	"testing"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// heir is the server of a key that it has from a lost one.
func heir(t *testing.T, model string) *play {
	p := newPlay(t, func(p *play, w *wire.Tensor) {
		p.shell.Round.Elastic = true
		w.Op, w.Sync.Model = units.Average, model
	})
	p.ranks[2] = &roomtest.Rank{Number: 2}
	return p
}

func (p *play) supply(rank int, iteration uint64, value float32) {
	p.Helper()
	p.serve(rank, wire.Header{Type: wire.TypeSupply, Iteration: iteration, Divisor: 3}, roomtest.Floats(n, value))
}

// Whoever comes first, a rank that has the result of an iteration or one that lacks it: what is supplied is the result for all.
func TestASuppliedResultIsTheResultForAll(t *testing.T) {
	for name, order := range map[string][]func(p *play){
		"the lacking first":       {func(p *play) { p.push(0, 4, 0, 1) }, func(p *play) { p.push(1, 5, 0, 6) }, func(p *play) { p.supply(1, 4, 7) }},
		"the supply first":        {func(p *play) { p.supply(1, 4, 7) }, func(p *play) { p.push(1, 5, 0, 6) }, func(p *play) { p.push(0, 4, 0, 1) }},
		"the later push first":    {func(p *play) { p.push(1, 5, 0, 6) }, func(p *play) { p.push(0, 4, 0, 1) }, func(p *play) { p.supply(1, 4, 7) }},
		"supplied by two of them": {func(p *play) { p.push(1, 5, 0, 6) }, func(p *play) { p.supply(1, 4, 7) }, func(p *play) { p.supply(1, 4, 7) }, func(p *play) { p.push(0, 4, 0, 1) }},
	} {
		t.Run(name, func(t *testing.T) {
			p := heir(t, "")
			for _, do := range order {
				do(p)
			}
			p.gets(0, 7, 3)
			p.push(2, 4, 0, 2)
			p.gets(2, 7, 3)
			p.push(0, 5, 0, 3)
			p.waits(0)
			p.push(2, 5, 0, 0)
			for rank := range p.ranks {
				p.gets(rank, 3, 3)
			}
		})
	}
}

// What nobody has who is left is summed anew, when all who are left have pushed it.
func TestAResultThatOnlyALostRankHadIsMadeAnew(t *testing.T) {
	p := heir(t, "")
	p.push(1, 5, 0, 6)
	p.push(0, 4, 0, 1)
	p.push(2, 4, 0, 2)
	p.waits(0)
	p.shell.HasLeft = rankset.Of(1)
	p.room.UpdateMembership()
	p.gets(0, 1.5, 2)
	p.gets(2, 1.5, 2)
}

const needsAll = "rank 1 has gone, and reducescatter needs every rank of its process set"

// TestAReducescatterEndsWithoutAPartOfALostRank: when all who are left have pushed it at the heir, nobody has its result.
func TestAReducescatterEndsWithoutAPartOfALostRank(t *testing.T) {
	for name, order := range map[string][]func(p *play){
		"lost before it is pushed": {func(p *play) { p.lose(1) }, func(p *play) { p.push(0, 4, 0, 1) }, func(p *play) { p.push(2, 4, 0, 1) }},
		"lost with its result": {
			func(p *play) { p.push(1, 5, 0, 6) }, func(p *play) { p.push(0, 4, 0, 1) }, func(p *play) { p.push(2, 4, 0, 1) }, func(p *play) { p.lose(1) },
		},
		"lost with its result, before others push": {
			func(p *play) { p.push(1, 5, 0, 6) }, func(p *play) { p.push(0, 4, 0, 1) }, func(p *play) { p.lose(1) }, func(p *play) { p.push(2, 4, 0, 1) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := heir(t, "")
			p.w.Kind = units.Reducescatter
			for i, do := range order {
				if said := p.shell.Said(); len(said) > 0 {
					t.Errorf("%q after %d of %d", said, i, len(order))
				}
				do(p)
			}
			if said := p.shell.Said(); len(said) != 1 || said[0] != "fail 0: "+needsAll {
				t.Errorf("%q", said)
			}
		})
	}
}

// TestASuppliedReducescatterGoesOnWithoutALostRank: who has the result may come after the one that lacks it.
func TestASuppliedReducescatterGoesOnWithoutALostRank(t *testing.T) {
	p := heir(t, "")
	p.w.Kind = units.Reducescatter
	p.lose(1)
	p.push(0, 4, 0, 1)
	p.waits(0)
	p.supply(2, 4, 7)
	p.gets(0, 7, 3)
	if said := p.shell.Said(); len(said) > 0 {
		t.Errorf("%q", said)
	}
}

// lose has a rank be lost, as the server goes on without it.
func (p *play) lose(rank int) {
	p.shell.HasLeft = rankset.Of(rank)
	for _, seq := range p.room.WaitsFor(rank) {
		p.shell.Fail(seq, units.FailUnsupported, needsAll)
	}
	p.room.UpdateMembership()
}

// A straggler that a lost server went on without hears that its sum is lost.
func TestAStragglersSumIsLostWithItsServer(t *testing.T) {
	p := heir(t, "drop-stragglers:2")
	p.push(0, 5, 0, 1)
	_, ends := p.lends(1, 3, 1)
	if said := p.shell.Said(); len(said) != 1 || len(*ends) != 1 || (*ends)[0] == nil {
		t.Errorf("%q, and what was lent has come back %v", said, *ends)
	}
	p.push(2, 3, 0, 1)
	if said := p.shell.Said(); len(said) != 1 || said[0] != `refuse 0 of rank 2: the sum of iteration 3, which was closed without this rank, was lost with its server` {
		t.Errorf("%q", said)
	}
}

func TestWhatIsNoResultIsNoSupply(t *testing.T) {
	p := heir(t, "")
	for _, h := range []wire.Header{{DType: units.Int32}, {DType: units.Float32, Codec: wire.CodecDeclared}, {DType: units.Float32, Flags: wire.FlagEmpty}} {
		h.Type = wire.TypeSupply
		if err := p.room.Serve(p.ranks[0].Request(h, roomtest.Floats(n, 1), 4*n)); err == nil {
			t.Errorf("%+v is taken in", h)
		}
	}
	p.shell.Round.Elastic = false
	if err := p.room.Serve(p.ranks[0].Request(wire.Header{Type: wire.TypeSupply, DType: units.Float32}, roomtest.Floats(n, 1), 4*n)); err == nil {
		t.Error("a job that is not elastic takes a supply in")
	}
}
