package held

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// heir is the server of a value that it has from a lost one.
func heir(t *testing.T, model string, change func(*wire.Tensor)) *play {
	p := newPlay(t, model, func(w *wire.Tensor) {
		if change != nil {
			change(w)
		}
	})
	p.shell.Round.Elastic = true
	p.ranks[2] = &roomtest.Rank{Number: 2}
	return p
}

// covers are the operations of each rank that are in a value, which all were pushes.
func covers(operations ...uint64) wire.Cover {
	c := wire.Cover{Closed: slices.Min(operations)}
	for rank, n := range operations {
		c.Ranks = append(c.Ranks, wire.CoveredPushes{Rank: uint16(rank), Next: n, Pushed: n})
	}
	return c
}

func (p *play) supply(rank int, value float32, c wire.Cover) {
	p.Helper()
	p.serve(rank, wire.Header{Type: wire.TypeCover}, c.Append(nil))
	p.serve(rank, wire.Header{Type: wire.TypeSupply, DType: units.Float32}, roomtest.Floats(n, value))
}

func (p *play) use(rank int, operation uint64, value float32) {
	p.Helper()
	p.serve(rank, wire.Header{Type: wire.TypePush, DType: units.Float32, Iteration: operation, Seq: operation}, roomtest.Floats(n, value))
}

// gets checks that a rank has got one answer, these values, and before it what they cover.
func (p *play) gets(rank int, value float32, c wire.Cover) {
	p.Helper()
	answers := p.ranks[rank].Take()
	if len(answers) != 2 || answers[0].Type != wire.TypeCover || answers[1].Type != wire.TypeResult {
		p.Errorf("rank %d gets %+v, want a cover and a value", rank, answers)
		return
	}
	if !bytes.Equal(answers[0].Payload, c.Append(nil)) {
		var got wire.Cover
		err := got.Decode(answers[0].Payload)
		p.Errorf("rank %d gets a value that covers %+v (%v), want %+v", rank, got, err, c)
	}
	if !slices.Equal(answers[1].Payload, roomtest.Floats(n, value)) {
		p.Errorf("rank %d gets another value than %g", rank, value)
	}
}

// The newest value goes on, whoever comes first; a push that it covers is answered, and not added again.
func TestTheNewestValueGoesOn(t *testing.T) {
	steps := map[string]func(p *play){
		"rank 0, whose push is covered": func(p *play) { p.supply(0, 5, covers(2, 2, 1)); p.use(0, 2, 100) },
		"rank 1, which has the newest":  func(p *play) { p.supply(1, 7, covers(3, 3, 1)); p.use(1, 3, 10) },
		"rank 2, whose push is not":     func(p *play) { p.supply(2, 4, covers(1, 1, 1)); p.use(2, 1, 20) },
	}
	names := []string{"rank 0, whose push is covered", "rank 1, which has the newest", "rank 2, whose push is not"}
	for _, order := range [][]int{{0, 1, 2}, {1, 0, 2}, {2, 1, 0}, {1, 2, 0}} {
		p := heir(t, "asp", nil)
		for i, k := range order {
			steps[names[k]](p)
			if i < 2 {
				for rank := range p.ranks {
					p.waits(rank)
				}
			}
		}
		p.use(0, 3, 0)
		answers := p.ranks[0].Take()
		if last := answers[len(answers)-1]; !slices.Equal(last.Payload, roomtest.Floats(n, 37)) {
			t.Errorf("%v: the value is not 7 + 10 + 20", order)
		}
	}
}

// A value waits for nobody who has gone, and conditions hold as they did: rank 0 is two iterations ahead.
func TestAValueGoesOnUnderItsConditions(t *testing.T) {
	p := heir(t, "ssp:1", nil)
	p.supply(0, 5, covers(2, 1, 1))
	p.use(0, 2, 10)
	p.supply(1, 4, covers(1, 1, 1))
	p.waits(0)
	p.shell.HasLeft = rankset.Of(2)
	p.room.UpdateMembership()
	p.waits(0)
	p.use(1, 1, 20)
	p.gets(1, 35, wire.Cover{Closed: 2, Ranks: []wire.CoveredPushes{{Rank: 0, Next: 3, Pushed: 3}, {Rank: 1, Next: 2, Pushed: 2}, {Rank: 2, Next: 1, Pushed: 1}}})
	p.waits(0)
	p.use(1, 2, 40)
	p.gets(0, 75, wire.Cover{Closed: 3, Ranks: []wire.CoveredPushes{{Rank: 0, Next: 3, Pushed: 3}, {Rank: 1, Next: 3, Pushed: 3}, {Rank: 2, Next: 1, Pushed: 1}}})
}

// A rank that had not got the first value comes for it again, and gets what the value is now. Shares and scales are as before.
func TestARankThatComesAgainGetsTheValueThatGoesOn(t *testing.T) {
	p := heir(t, "asp", func(w *wire.Tensor) { w.Op, w.Prescale, w.Postscale = units.Average, 3, 2 })
	p.push(0, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	p.pull(2, wire.FlagDeclare)
	p.supply(1, 8, covers(0, 1, 0))
	for _, rank := range []int{0, 2} {
		p.gets(rank, 8, covers(0, 1, 0))
	}
	p.use(1, 1, 1)
	p.gets(1, 10, covers(0, 2, 0))
}

func TestWhatIsNoValueIsNoSupply(t *testing.T) {
	p := heir(t, "asp", nil)
	send := func(rank int, h wire.Header, payload []byte) error {
		h.Tensor = 1
		return p.room.Serve(p.ranks[rank].Request(h, payload, 4*n))
	}
	good := wire.Header{Type: wire.TypeSupply, DType: units.Float32}
	for name, err := range map[string]error{
		"without a cover":   send(0, good, roomtest.Floats(n, 1)),
		"too short":         send(0, good, roomtest.Floats(n-1, 1)),
		"of another type":   send(0, wire.Header{Type: wire.TypeSupply, DType: units.Int32}, roomtest.Floats(n, 1)),
		"coded":             send(0, wire.Header{Type: wire.TypeSupply, DType: units.Float32, Codec: wire.CodecDeclared}, roomtest.Floats(n, 1)),
		"of a foreign rank": send(0, wire.Header{Type: wire.TypeCover}, covers(1, 1, 1, 1).Append(nil)),
		"of half a rank":    send(0, wire.Header{Type: wire.TypeCover}, covers(1, 1).Append(nil)[:20]),
	} {
		if err == nil {
			t.Errorf("a value %s is taken in", name)
		}
	}
	p.supply(0, 5, covers(1, 1, 1))
	p.use(0, 1, 10)
	p.use(0, 2, 10)
	if said := p.shell.Said(); len(said) != 1 || !strings.Contains(said[0], "rank 0 uses") {
		t.Errorf("a second use while the first waits: %q", said)
	}
	p.shell.Round.Elastic = false
	if err := send(0, wire.Header{Type: wire.TypeCover}, covers(1).Append(nil)); err == nil {
		t.Error("a job that is not elastic takes a cover in")
	}
}

// Where there is no memory for a value every rank that uses it hears so, and keeps its connection.
func TestAValueWithoutMemoryIsAnErrorForAll(t *testing.T) {
	p := heir(t, "asp", nil)
	var taken [][]byte
	for size := 1 << 19; size >= 4*n; {
		b, err := p.shell.Round.Pool.Get(size)
		if err != nil {
			size /= 2
			continue
		}
		taken = append(taken, b)
	}
	p.supply(0, 5, covers(1, 1, 1))
	for _, b := range taken {
		p.shell.Round.Pool.Put(b)
	}
	p.supply(1, 5, covers(1, 1, 1))
	p.supply(2, 5, covers(1, 1, 1))
	for rank := range p.ranks {
		p.use(rank, 1, 10)
		if said := p.shell.Said(); len(said) != 1 || !strings.Contains(said[0], "does not go on after the loss of its server") {
			t.Errorf("rank %d: %q", rank, said)
		}
	}
}
