package sums

import (
	"math"
	"slices"
	"testing"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

const n = 64 // elements

// play is a room with one sum of three ranks, the last of which is in this process.
type play struct {
	*testing.T
	shell *roomtest.Shell
	w     *room.Tensor
	room  *Room
	ranks [3]*roomtest.Rank
}

func newPlay(t *testing.T, change func(*play, *wire.Tensor)) *play {
	p := &play{T: t, shell: roomtest.New(t, 3, 1<<22)}
	w := roomtest.Allreduce(n)
	if change != nil {
		change(p, &w)
	}
	p.w = p.shell.Tensor(t, w)
	p.room = New(p.w)
	p.shell.OnDrop = func(iteration uint64) { p.cancel(iteration) }
	for i := range p.ranks {
		p.ranks[i] = &roomtest.Rank{Number: i, Local: i == 2}
	}
	t.Cleanup(func() {
		p.cancel(0)
		p.shell.CheckMemory(t)
	})
	return p
}

func (p *play) cancel(from uint64) {
	p.w.GiveUp(from)
	p.room.Cancel(from, inprocess.ErrCancelled)
}

func (p *play) serve(rank int, h wire.Header, payload []byte) {
	p.Helper()
	h.Tensor, h.DType = 1, units.Float32
	if err := p.room.Serve(p.ranks[rank].Request(h, payload, int(p.w.Parts[0]))); err != nil {
		p.Error(err)
	}
}

func (p *play) push(rank int, iteration uint64, flags wire.Flags, value float32) {
	p.Helper()
	var payload []byte
	if flags&wire.FlagEmpty == 0 {
		payload = roomtest.Floats(int(p.w.Parts[0])/4, value)
	}
	p.serve(rank, wire.Header{Type: wire.TypePush, Iteration: iteration, Flags: flags}, payload)
}

// gets checks that a rank has got one answer, of this value and divisor, since the last call.
func (p *play) gets(rank int, value float32, divisor uint32) {
	p.Helper()
	answers := p.ranks[rank].Take()
	if len(answers) != 1 || answers[0].Err != nil || uint32(answers[0].Divisor) != divisor || !slices.Equal(answers[0].Payload, roomtest.Floats(int(p.w.Parts[0])/4, value)) {
		p.Errorf("rank %d gets %+v, want one answer of %g by %d", rank, answers, value, divisor)
	}
}

func (p *play) waits(rank int) {
	p.Helper()
	if answers := p.ranks[rank].Take(); len(answers) > 0 {
		p.Errorf("rank %d gets %+v before the iteration is closed", rank, answers)
	}
}

func (p *play) cancelled(rank int) {
	p.Helper()
	if answers := p.ranks[rank].Take(); len(answers) != 1 || answers[0].Err == nil {
		p.Errorf("rank %d gets %+v, want one error", rank, answers)
	}
}

// Every order of arrival, the local worker's among them, gives all ranks the same sum when the last has come.
func TestEveryRankGetsTheSumWhenTheLastHasCome(t *testing.T) {
	for _, large := range []bool{false, true} {
		for _, order := range [][]int{{0, 1, 2}, {2, 0, 1}, {0, 2, 1}} {
			p := newPlay(t, func(_ *play, w *wire.Tensor) {
				if large { // more than a chunk
					w.Parts[0] = 4 * (room.ChunkBytes/4 + n)
				}
			})
			for iteration := range uint64(3) {
				for i, rank := range order {
					p.push(rank, iteration, 0, float32(rank+1))
					if i < 2 {
						p.waits(rank)
					}
				}
				for rank := range p.ranks {
					p.gets(rank, 6, 3)
				}
			}
		}
	}
}

// A chunk that has come whole counts or not with the rest of its push: one that breaks off in between adds nothing to
// what the others get once its rank is gone.
func TestTheLocalTensorIsReadUntilTheIterationIsClosed(t *testing.T) {
	p := newPlay(t, nil)
	p.push(2, 0, wire.FlagNoPull, 1)
	p.push(0, 0, 0, 1)
	p.waits(2)
	p.push(1, 0, wire.FlagNoPull, 1)
	p.gets(0, 3, 3)
	if answers := p.ranks[2].Take(); len(answers) != 1 || answers[0].Err != nil {
		t.Errorf("%+v, want the end of its operation", answers)
	}
	p.waits(1)
}

func TestWhatIsEmptyCountsAsZeros(t *testing.T) {
	p := newPlay(t, nil)
	for rank := range p.ranks {
		p.push(rank, 0, wire.FlagEmpty, 0)
	}
	if a := p.ranks[0].Take(); len(a) != 1 || a[0].Flags != wire.FlagEmpty || len(a[0].Payload) > 0 {
		t.Errorf("%+v", a)
	}
	p.gets(2, 0, 3)
	p.push(0, 1, 0, 5)
	p.push(1, 1, wire.FlagEmpty, 0)
	p.push(2, 1, wire.FlagEmpty, 0)
	p.gets(0, 5, 3)
	p.gets(2, 5, 3)
}

// Horovod's join: averages divide by the ranks that have joined too.
func TestARankThatHasJoinedCountsAsZeros(t *testing.T) {
	p := newPlay(t, func(_ *play, w *wire.Tensor) { w.Op = units.Average })
	p.push(0, 0, 0, 3)
	p.push(2, 0, 0, 6)
	p.waits(0)
	p.shell.HasDone = rankset.Of(1)
	p.room.UpdateMembership()
	p.gets(0, 3, 3)
	p.gets(2, 3, 3)
}

// A minimum, a maximum and a product heed those zeros, also where contributions are kept apart.
func TestZerosOfJoinedRanksAreReduced(t *testing.T) {
	for op, want := range map[units.ReduceOp]float32{units.Sum: -5, units.Min: -3, units.Max: 0, units.Product: 0} {
		for _, inOrder := range []bool{false, true} {
			p := newPlay(t, func(p *play, w *wire.Tensor) { w.Op, p.shell.Round.RankOrder = op, inOrder })
			p.push(0, 0, 0, -2)
			p.push(2, 0, 0, -3)
			p.shell.HasDone = rankset.Of(1)
			p.room.UpdateMembership()
			p.gets(0, want, 3)
			p.gets(2, want, 3)
		}
	}
}

// Without a joined rank's rows a reducescatter has no result; its home server fails it.
func TestAReducescatterWaitsForARankThatHasJoined(t *testing.T) {
	p := newPlay(t, func(_ *play, w *wire.Tensor) { w.Kind = units.Reducescatter })
	p.push(0, 0, 0, 3)
	p.push(2, 0, 0, 6)
	p.shell.HasDone = rankset.Of(1)
	p.room.UpdateMembership()
	p.waits(0)
	p.waits(2)
}

// In rank order, or where a rank may be left out, contributions are kept whole; the local worker's is read in place.
func TestSumsInRankOrderAreTheSame(t *testing.T) {
	p := newPlay(t, func(p *play, _ *wire.Tensor) { p.shell.Round.RankOrder = true })
	p.push(2, 0, 0, -1<<24)
	p.push(1, 0, 0, 1<<24)
	p.push(0, 0, 0, 1)
	for rank := range p.ranks { // (1 + 2^24) - 2^24, where 2^24 + 1 is not a float32
		p.gets(rank, 0, 3)
	}
}

// Drop-stragglers: a rank that comes late for a closed iteration gets its sum, and adds nothing.
func TestALateRankGetsTheSumThatTheOthersHave(t *testing.T) {
	p := newPlay(t, func(_ *play, w *wire.Tensor) { w.Sync.Model = "drop-stragglers:2" })
	p.push(0, 0, 0, 1)
	p.push(1, 0, 0, 1)
	p.gets(0, 2, 2)
	p.gets(1, 2, 2)
	p.push(2, 0, 0, 1)
	p.gets(2, 2, 2)
}

func TestACancelEndsTheLocalWorkersOperation(t *testing.T) {
	p := newPlay(t, nil)
	p.push(2, 0, 0, 1)
	p.push(0, 0, 0, 1)
	if seqs := p.room.WaitsFor(1); len(seqs) != 1 {
		t.Errorf("waits for rank 1: %v", seqs)
	}
	p.cancel(0)
	p.cancelled(2)
	p.push(2, 1, 0, 1)
	p.cancelled(2)
	p.waits(0)
}

func TestASecondPushOfARankAddsNothing(t *testing.T) {
	p := newPlay(t, nil)
	p.push(0, 0, 0, 1)
	p.push(0, 0, 0, 1)
	p.push(1, 0, 0, 1)
	p.push(2, 0, 0, 1)
	p.gets(0, 3, 3)
}

func TestWithoutMemoryTheOperationFailsOnEveryRank(t *testing.T) {
	p := newPlay(t, nil)
	all, err := p.shell.Round.Pool.Get(1 << 22)
	if err != nil {
		t.Fatal(err)
	}
	p.push(2, 0, 0, 1)
	p.cancelled(2)
	if said := p.shell.Said(); len(said) != 2 || said[1] != "drop from 0" {
		t.Errorf("%q", said)
	}
	p.shell.Round.Pool.Put(all)
}

func TestAMalformedMessageFailsTheOperation(t *testing.T) {
	p := newPlay(t, func(_ *play, w *wire.Tensor) { w.Codec = "topk:0.5" })
	p.serve(0, wire.Header{Type: wire.TypePush, Codec: wire.CodecDeclared, Seq: 7}, []byte("no message"))
	if said := p.shell.Said(); len(said) != 2 || said[1] != "drop from 0" {
		t.Errorf("%q", said)
	}
}

// A barrier has an operator and scales as little as it has bytes, whatever its ranks say.
func TestABarrierHasNoOperator(t *testing.T) {
	for op := units.ReduceOp(0); op.Valid(); op++ {
		for _, dtype := range []units.DType{units.Uint8, units.Float32} {
			p := newPlay(t, func(_ *play, w *wire.Tensor) {
				w.Kind, w.Op, w.DType, w.Parts, w.Prescale, w.Postscale = units.Barrier, op, dtype, []uint32{0}, 2, 3
			})
			for rank := range p.ranks {
				if err := p.room.Serve(p.ranks[rank].Request(wire.Header{Type: wire.TypePush, Tensor: 1, DType: dtype}, nil, 0)); err != nil {
					t.Fatalf("%v of %v: %v", op, dtype, err)
				}
			}
			for rank := range p.ranks {
				if a := p.ranks[rank].Take(); len(a) != 1 || a[0].Err != nil || a[0].Type != wire.TypeResult || len(a[0].Payload) > 0 {
					t.Errorf("%v of %v: rank %d gets %+v", op, dtype, rank, a)
				}
			}
		}
	}
}

// The residual of the answers goes to a checkpoint and comes back; without one the answer is empty.
func TestAResidualComesBackAsItWasSet(t *testing.T) {
	p := newPlay(t, func(_ *play, w *wire.Tensor) { w.Codec = "topk:0.5" })
	state := wire.Header{Type: wire.TypeState, Iteration: 1}
	p.serve(0, state, nil)
	if a := p.ranks[0].Take(); len(a) != 1 || len(a[0].Payload) > 0 {
		t.Errorf("%+v before there is a residual", a)
	}
	p.serve(1, wire.Header{Type: wire.TypeRestore, Offset: n / 4}, roomtest.Floats(n/4, 3))
	p.serve(0, state, nil)
	want := slices.Concat(roomtest.Floats(n/4, 0), roomtest.Floats(n/4, 3), roomtest.Floats(n/2, 0))
	if a := p.ranks[0].Take(); len(a) != 1 || !slices.Equal(a[0].Payload, want) {
		t.Errorf("%+v", a)
	}
	by, _ := codec.Parse("topk:0.5")
	message := make([]byte, by.MaxEncoded(n))
	message = message[:by.Encode(message, roomtest.Floats(n, 1), make([]byte, by.ResidualBytes(n)), codec.Stream{})]
	for rank := range p.ranks {
		p.serve(rank, wire.Header{Type: wire.TypePush, Codec: wire.CodecDeclared}, message)
	}
	local := p.ranks[2].Take()
	if len(local) != 1 || local[0].Err != nil || !slices.Contains(units32(local[0].Payload), 6) {
		t.Errorf("the answer is without the residual: %+v", local)
	}
}

func TestAConditionChangesAtItsIteration(t *testing.T) {
	p := newPlay(t, func(_ *play, w *wire.Tensor) { w.Sync.Model = "drop-stragglers:3" })
	one, err := condition.Parse("drop-stragglers:1")
	if err != nil {
		t.Fatal(err)
	}
	p.push(0, 0, 0, 1)
	p.room.Change(room.Change{At: 1, In: condition.SetPush(one.Push)})
	p.waits(0)
	p.push(1, 0, 0, 1)
	p.push(2, 0, 0, 1)
	p.gets(0, 3, 3)
	p.push(0, 1, 0, 4)
	p.gets(0, 4, 1)
	if keys, pushed := p.room.Count(); keys != 1 || pushed != 2 {
		t.Errorf("%d keys, %d iterations pushed", keys, pushed)
	}
}

func TestWhatIsNoPushOfTheKeyIsAnError(t *testing.T) {
	p := newPlay(t, nil)
	for _, h := range []wire.Header{
		{Type: wire.TypePush, DType: units.Int32}, {Type: wire.TypePush, DType: units.Float32, Part: 1},
		{Type: wire.TypePush, DType: units.Float32, Codec: wire.CodecDeclared}, {Type: wire.TypePull}, {Type: wire.TypeState}, {Type: wire.TypeReport},
	} {
		if err := p.room.Serve(p.ranks[0].Request(h, roomtest.Floats(n, 1), 4*n)); err == nil {
			t.Errorf("%+v is served", h)
		}
	}
}

// TestAnIterationAllocatesNothing in steady state: pushes of the local worker and of connections, their sum and its answers.
func TestAnIterationAllocatesNothing(t *testing.T) {
	p := newPlay(t, nil)
	requests := make([]*room.Request, len(p.ranks))
	out, payload := make([]byte, 4*n), roomtest.Floats(n, 1)
	iteration := uint64(0)
	push := func() {
		for rank := range requests {
			if requests[rank] == nil {
				requests[rank] = &room.Request{}
			}
			*requests[rank] = room.Request{
				Header:  wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float32, Rank: uint16(rank), Iteration: iteration},
				Payload: room.Lasting(payload), Reply: room.Reply{Out: out, Done: func(wire.Header, error) {}},
			}
			if err := p.room.Serve(requests[rank]); err != nil {
				t.Fatal(err)
			}
		}
		iteration++
	}
	if allocations := testing.AllocsPerRun(100, push); allocations >= 1 && !invariant.On {
		t.Errorf("%g allocations an iteration of three ranks", allocations)
	}
}

func units32(b []byte) (values []float32) {
	for i := 0; i+4 <= len(b); i += 4 {
		values = append(values, math.Float32frombits(uint32(b[i])|uint32(b[i+1])<<8|uint32(b[i+2])<<16|uint32(b[i+3])<<24))
	}
	return values
}

// Where the sum has its memory and the push that is to be kept for it finds none, the operation ends once.
func TestWithoutMemoryForAKeptMessageThePushIsAnsweredOnce(t *testing.T) {
	p := newPlay(t, func(p *play, w *wire.Tensor) { p.shell.Round.RankOrder, w.Codec = true, "topk:0.5" })
	for size := 1 << 21; size >= 1<<12; size /= 2 {
		lent, err := p.shell.Round.Pool.Get(size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.shell.Round.Pool.Put(lent) })
	}
	p.serve(2, wire.Header{Type: wire.TypePush, Codec: wire.CodecDeclared}, make([]byte, 8))
	p.cancelled(2)
	if said := p.shell.Said(); len(said) != 2 || said[1] != "drop from 0" {
		t.Errorf("%q", said)
	}
}

// lends has a rank of another process lend its tensor, where the answer belongs too. It returns the memory, and how the push ends.
func (p *play) lends(rank int, iteration uint64, value float32) (memory []byte, answers *[]error) {
	memory, answers = roomtest.Floats(n, value), new([]error)
	q := &room.Request{
		Header:  wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float32, Rank: uint16(rank), Iteration: iteration},
		Payload: room.Lasting(memory),
		Reply:   room.Reply{Out: memory, Done: func(_ wire.Header, err error) { *answers = append(*answers, err) }},
	}
	if err := p.room.Serve(q); err != nil {
		p.Error(err)
	}
	return memory, answers
}

func TestWhatSeveralRanksLendIsSummedWithTheOthers(t *testing.T) {
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}} {
		for lending := range 1 << 3 {
			p := newPlay(t, nil)
			var lent [][]byte
			var ends []*[]error
			for _, rank := range order {
				if lending>>rank&1 == 0 {
					p.push(rank, 0, 0, float32(rank+1))
					continue
				}
				memory, answers := p.lends(rank, 0, float32(rank+1))
				lent, ends = append(lent, memory), append(ends, answers)
			}
			for i, memory := range lent {
				if values := units32(memory); slices.Min(values) != 6 || slices.Max(values) != 6 || len(*ends[i]) != 1 || (*ends[i])[0] != nil {
					t.Errorf("%v, of whom %b lend: %v, %v", order, lending, values[:2], *ends[i])
				}
			}
			for rank := range p.ranks {
				if lending>>rank&1 == 0 {
					p.gets(rank, 6, 3)
				}
			}
		}
	}
}

func TestWhatIsLentComesBackWithACancel(t *testing.T) {
	p := newPlay(t, nil)
	memory, answers := p.lends(0, 0, 1)
	p.lends(1, 0, 2)
	p.cancel(0)
	if len(*answers) != 1 || (*answers)[0] == nil || units32(memory)[0] != 1 {
		t.Errorf("%v, memory %v", *answers, units32(memory)[:2])
	}
}
