package transfer

import (
	"errors"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

// play is a room with one broadcast of rank 0 under three ranks, the last of which is in this process.
type play struct {
	*testing.T
	shell  *roomtest.Shell
	room   *Room
	tensor *room.Tensor
	ranks  [3]*roomtest.Rank
}

func newPlay(t *testing.T) *play {
	p := &play{T: t, shell: roomtest.New(t, 3, 1<<20)}
	p.room = New(&p.shell.Round)
	p.tensor = p.shell.Tensor(t, wire.Tensor{ID: 1, Name: "b", Kind: units.Broadcast, DType: units.Uint8, Parts: []uint32{4}})
	for i := range p.ranks {
		p.ranks[i] = &roomtest.Rank{Number: i, Local: i == 2}
	}
	t.Cleanup(func() { p.shell.CheckMemory(t) })
	return p
}

func (p *play) serve(rank int, h wire.Header, payload string) {
	p.Helper()
	h.Tensor = 1
	if err := p.room.Serve(p.tensor, p.ranks[rank].Request(h, []byte(payload), 4)); err != nil {
		p.Error(err)
	}
}

func route(h wire.Header, from, to int) wire.Header {
	h.Source, h.Destination = wire.Route(from, to)
	return h
}

func (p *play) put(rank, to int, flags wire.Flags, payload string) {
	p.serve(rank, route(wire.Header{Type: wire.TypePut, Flags: flags}, rank, to), payload)
}

func (p *play) get(rank, from, to int) {
	p.serve(rank, route(wire.Header{Type: wire.TypeGet}, from, to), "")
}

// has checks what a rank has got since the last call.
func (p *play) has(rank int, payloads ...string) {
	p.Helper()
	answers := p.ranks[rank].Take()
	if len(answers) != len(payloads) {
		p.Fatalf("rank %d has %d answers, want %q", rank, len(answers), payloads)
	}
	for i, a := range answers {
		if string(a.Payload) != payloads[i] || a.Err != nil {
			p.Errorf("rank %d: %q, %v, want %q", rank, a.Payload, a.Err, payloads[i])
		}
	}
}

func TestReadersGetWhatIsPutBeforeAndAfterTheyAsk(t *testing.T) {
	p := newPlay(t)
	p.get(1, 0, -1)
	p.has(1)
	p.put(0, -1, 0, "data")
	p.has(1, "data")
	if p.shell.Round.Pool.Lent() == 0 {
		t.Error("the item is gone before its last reader")
	}
	p.get(2, 0, -1)
	p.has(2, "data")
	p.has(0) // it did not ask for a confirmation
}

// On the home server no reader is answered, and the source not confirmed, before every rank has come.
func TestAtHomeNobodyIsAnsweredBeforeAllHaveAsked(t *testing.T) {
	p := newPlay(t)
	p.get(1, 0, -1)
	p.put(0, -1, wire.FlagHome, "data")
	p.has(1)
	p.has(0)
	p.get(2, 0, -1)
	p.has(1, "data")
	p.has(2, "data")
	p.has(0, "")
}

// In an elastic job a rank puts again what was on a lost server, also for one that has it. When a rank begins the next iteration all have what was before.
func TestWhatIsPutAgainForOneThatHasItStaysUntilTheNextIteration(t *testing.T) {
	p := newPlay(t)
	p.shell.Round.Elastic = true
	at := func(iteration uint64, typ wire.Type, rank, from, to int, payload string) {
		p.serve(rank, route(wire.Header{Type: typ, Iteration: iteration}, from, to), payload)
	}
	at(4, wire.TypePut, 0, 0, 1, "had")
	at(4, wire.TypePut, 1, 1, 0, "had")
	one := p.shell.Round.Pool.Lent() / 2
	at(5, wire.TypeGet, 1, 0, 1, "")
	if lent := p.shell.Round.Pool.Lent(); lent != room.WaitingBytes {
		t.Errorf("%d bytes are in use, want those of the get that waits", lent)
	}
	at(4, wire.TypePut, 0, 0, 1, "late")
	at(5, wire.TypePut, 0, 0, 1, "data")
	p.has(1, "data")
	if lent := p.shell.Round.Pool.Lent(); lent != one {
		t.Errorf("%d bytes are in use, want those of one that was late", lent)
	}
	at(6, wire.TypePut, 0, 0, 1, "next")
	at(6, wire.TypeGet, 1, 0, 1, "")
	p.has(1, "next")
	p.has(0)
}

// What the worker in this process puts is read where it lies until the last reader has it.
func TestTheLocalWorkersTensorIsSentFromWhereItLies(t *testing.T) {
	p := newPlay(t)
	p.put(2, -1, 0, "data")
	if lent := p.shell.Round.Pool.Lent(); lent != 0 {
		t.Errorf("%d bytes are copied", lent)
	}
	p.get(0, 2, -1)
	p.has(2)
	p.get(1, 2, -1)
	p.has(0, "data")
	p.has(1, "data")
	p.has(2, "\x00\x00\x00\x00") // done, with nothing for it
}

func TestTheFirstOfTwoPutsStands(t *testing.T) {
	p := newPlay(t)
	p.put(0, 1, 0, "data")
	p.put(0, 1, 0, "more")
	p.get(1, 0, 1)
	p.has(1, "data")
}

func TestACancelEndsTheLocalWorkersOperationsAndLetsTheMemoryGo(t *testing.T) {
	p := newPlay(t)
	p.get(2, 1, -1)
	p.put(2, -1, 0, "mine")
	p.put(0, -1, 0, "data")
	p.tensor.GiveUp(0)
	p.room.Cancel(1, 0, inprocess.ErrCancelled)
	p.put(2, -1, 0, "late")
	p.get(2, 0, -1)
	answers := p.ranks[2].Take()
	if len(answers) != 4 {
		t.Fatalf("%d answers", len(answers))
	}
	for _, a := range answers {
		if !errors.Is(a.Err, inprocess.ErrCancelled) {
			t.Errorf("%+v", a)
		}
	}
	p.put(0, -1, 0, "late")
	p.has(0)
}

func TestAPutWithoutMemoryFailsOnEveryRank(t *testing.T) {
	p := newPlay(t)
	p.shell.Round.Pool.Get(1 << 20)
	p.put(0, -1, 0, "data")
	said := p.shell.Said()
	if len(said) != 2 || said[1] != "drop from 0" {
		t.Errorf("%q", said)
	}
	p.shell.Round.Pool.Put(make([]byte, 1<<20))
}

func TestARouteThatIsNotTheSendersIsAnError(t *testing.T) {
	p := newPlay(t)
	for _, h := range []wire.Header{
		{Type: wire.TypePut, Source: 1, Destination: wire.EveryRank}, {Type: wire.TypePut, Destination: 3},
		{Type: wire.TypeGet, Source: 3, Destination: wire.EveryRank}, {Type: wire.TypeGet, Source: 1, Destination: 2},
	} {
		if err := p.room.Serve(p.tensor, p.ranks[0].Request(h, nil, 4)); err == nil {
			t.Errorf("%v from %d to %d is served", h.Type, h.Source, h.Destination)
		}
	}
}

// A rank may ask for what nobody ever puts: it gets the server no further than to its memory limit, and what it has asked for
// costs nothing any more when that is over.
func TestGetsThatAreNeverPutEndAtTheMemoryLimit(t *testing.T) {
	p := newPlay(t)
	const most = 1 << 20 / room.WaitingBytes
	for i := range 2 * most {
		p.serve(1, route(wire.Header{Type: wire.TypeGet, Iteration: uint64(i), Part: uint32(i % 3)}, 0, -1), "")
	}
	if n := len(p.room.items[1].items); n != most {
		t.Errorf("%d items wait, want %d", n, most)
	}
	if said := p.shell.Said(); len(said) < 2 || !strings.Contains(said[0], "memory limit is reached") {
		t.Errorf("the shell hears %.300q", said)
	}
	p.room.Cancel(1, 1, inprocess.ErrCancelled)
	if lent := p.shell.Round.Pool.Lent(); lent != room.WaitingBytes {
		t.Errorf("%d bytes are in use, want those of the one that waits", lent)
	}
	p.put(0, -1, 0, "data")
	p.get(2, 0, -1)
	p.has(1, "data")
	p.has(2, "data")
}
