package held

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/room/roomtest"
	"github.com/paceline/paceline/transport/wire"
)

const n = 64 // elements

// play is a room with one value of ones under three ranks, the last of which is in this process.
type play struct {
	*testing.T
	shell  *roomtest.Shell
	tensor *room.Tensor
	room   *Room
	copies *Copies
	ranks  [3]*roomtest.Rank
}

func newPlay(t *testing.T, sync string, change func(*wire.Tensor)) *play {
	p := &play{T: t, shell: roomtest.New(t, 3, 1<<20)}
	w := roomtest.Allreduce(n)
	w.Kind, w.Sync.Model = units.Accumulate, sync
	if change != nil {
		change(&w)
	}
	p.tensor = p.shell.Tensor(t, w)
	p.copies = NewCopies(p.shell.Round.Pool)
	p.shell.Round.Pool.Evict = p.copies.Evict
	p.room = New(p.tensor, p.copies, NewTuners())
	for i := range p.ranks {
		p.ranks[i] = &roomtest.Rank{Number: i, Local: i == 2}
	}
	t.Cleanup(func() {
		p.room.Cancel(0, inprocess.ErrCancelled)
		p.shell.CheckMemory(t)
	})
	return p
}

func (p *play) serve(rank int, h wire.Header, payload []byte) {
	p.Helper()
	h.Tensor = 1
	if err := p.room.Serve(p.ranks[rank].Request(h, payload, 4*n)); err != nil {
		p.Error(err)
	}
}

func (p *play) push(rank int, iteration uint64, flags wire.Flags, payload []byte) {
	p.serve(rank, wire.Header{Type: wire.TypePush, DType: units.Float32, Iteration: iteration, Flags: flags}, payload)
}

func (p *play) pull(rank int, flags wire.Flags) {
	p.serve(rank, wire.Header{Type: wire.TypePull, Flags: flags}, nil)
}

// declare has every rank come for the root's value.
func (p *play) declare() {
	p.push(0, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	p.pull(1, wire.FlagDeclare)
	p.pull(2, wire.FlagDeclare)
	for rank := range p.ranks {
		p.reads(rank, 1)
	}
}

// reads checks that a rank has got one answer, these values, since the last call.
func (p *play) reads(rank int, value float32) {
	p.Helper()
	answers := p.ranks[rank].Take()
	if len(answers) != 1 || answers[0].Err != nil || !slices.Equal(answers[0].Payload, roomtest.Floats(n, value)) {
		p.Errorf("rank %d gets %+v, want one answer of %g", rank, answers, value)
	}
}

func (p *play) waits(rank int) {
	p.Helper()
	if answers := p.ranks[rank].Take(); len(answers) > 0 {
		p.Errorf("rank %d gets %+v before its condition holds", rank, answers)
	}
}

func TestNobodyReadsADeclaredValueBeforeAllHaveCome(t *testing.T) {
	p := newPlay(t, "asp", nil)
	p.pull(2, wire.FlagDeclare)
	p.push(0, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	p.waits(0)
	p.waits(2)
	p.pull(1, wire.FlagDeclare)
	for rank := range p.ranks {
		p.reads(rank, 1)
	}
}

// FluentPS Algorithm 1 under SSP with s = 1: a rank that is one iteration ahead reads, one that is two ahead waits, with
// lazy parking until its own iteration is closed.
func TestARankReadsWithinItsLeadAndWaitsBeyond(t *testing.T) {
	p := newPlay(t, "ssp:1", nil)
	p.declare()
	p.push(2, 0, 0, roomtest.Floats(n, 1))
	p.reads(2, 2)
	p.push(2, 1, 0, roomtest.Floats(n, 1))
	p.waits(2)
	for iteration := range uint64(2) {
		p.waits(2)
		p.push(0, iteration, wire.FlagNoPull, roomtest.Floats(n, 1))
		p.push(1, iteration, wire.FlagNoPull, roomtest.Floats(n, 1))
	}
	p.reads(2, 7)
	p.waits(0)
	p.waits(1)
}

func TestAnEmptyPushCountsAndAddsNothing(t *testing.T) {
	p := newPlay(t, "", nil)
	p.declare()
	for rank := range p.ranks {
		p.push(rank, 0, wire.FlagEmpty, nil)
	}
	for rank := range p.ranks {
		p.reads(rank, 1)
	}
}

func TestWhoLeavesIsNotWaitedFor(t *testing.T) {
	p := newPlay(t, "", nil)
	p.declare()
	p.push(0, 0, 0, roomtest.Floats(n, 1))
	p.push(2, 0, 0, roomtest.Floats(n, 1))
	p.waits(0)
	p.shell.HasLeft = rankset.Of(1)
	p.room.UpdateMembership()
	p.reads(0, 3)
	p.reads(2, 3)
}

func TestWhatARankHasGivenUpIsNotAnswered(t *testing.T) {
	p := newPlay(t, "", nil)
	p.declare()
	p.push(2, 0, 0, roomtest.Floats(n, 1))
	p.room.Forget(2, 0, false)
	if answers := p.ranks[2].Take(); len(answers) != 1 || answers[0].Err == nil {
		t.Errorf("%+v", answers)
	}
	p.push(2, 1, 0, roomtest.Floats(n, 1)) // of the same operation, on its way
	if answers := p.ranks[2].Take(); len(answers) != 1 || answers[0].Err == nil {
		t.Errorf("%+v", answers)
	}
	if !p.room.Holds() {
		t.Error("the value is gone for one rank's giving up")
	}
}

func TestAReaderThatWaitsLongIsWarnedAndThenRefused(t *testing.T) {
	p := newPlay(t, "", nil)
	p.declare()
	p.push(2, 0, 0, roomtest.Floats(n, 1))
	start := time.Now()
	p.room.CheckStalls(start.Add(2 * time.Second))
	p.room.CheckStalls(start.Add(2500 * time.Millisecond))
	if said := p.shell.Said(); len(said) != 1 {
		t.Errorf("warnings: %q", said)
	}
	p.room.CheckStalls(start.Add(2 * time.Minute))
	want := "refuse 0 of rank 2: stalled: ranks 0, 1 did not come within 1m0s"
	if said := p.shell.Said(); len(said) != 1 || said[0] != want {
		t.Errorf("%q, want %q", said, want)
	}
	if answers := p.ranks[2].Take(); len(answers) != 1 || answers[0].Err == nil {
		t.Errorf("%+v", answers)
	}
}

func TestAChangeOfConditionHoldsFromItsIterationOn(t *testing.T) {
	p := newPlay(t, "ssp:1", nil)
	p.declare()
	model := p.shell.Tensor(t, func() wire.Tensor {
		w := roomtest.Allreduce(n)
		w.Kind = units.Accumulate
		w.Sync.Model = "asp"
		return w
	}()).Model
	p.push(2, 0, wire.FlagNoPull, roomtest.Floats(n, 1))
	p.push(2, 1, 0, roomtest.Floats(n, 1))
	p.ranks[2].Answers = slices.DeleteFunc(p.ranks[2].Answers, func(a roomtest.Answer) bool { return !slices.Equal(a.Payload[:4], roomtest.Floats(1, 3)) })
	p.waits(2)
	p.room.Change(room.Change{In: condition.SetPull(model.Pull), Pull: &model})
	p.reads(2, 3)
}

// Of a coded value, ranks with the same reference copy get the same delta, which is encoded once; a rank whose number
// is not the server's gets the value itself.
func TestRanksWithTheSameCopyGetOneDelta(t *testing.T) {
	p := newPlay(t, "asp", func(w *wire.Tensor) { w.Codec = "int8:block=8" })
	p.push(0, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	p.pull(1, wire.FlagDeclare)
	p.pull(2, wire.FlagDeclare)
	number := p.ranks[0].Take()[0].Reference
	if number == 0 || p.ranks[1].Take()[0].Reference != number || p.copies.Len() != 1 {
		t.Fatalf("copy %d, %d kept", number, p.copies.Len())
	}
	p.ranks[2].Take()
	by, _ := codec.Parse("int8:block=8")
	message := make([]byte, by.MaxEncoded(n))
	message = message[:by.Encode(message, roomtest.Floats(n, 1), nil, codec.Stream{})]
	p.serve(0, wire.Header{Type: wire.TypePush, DType: units.Float32, Codec: wire.CodecDeclared, Flags: wire.FlagNow, Reference: number}, message)
	p.serve(1, wire.Header{Type: wire.TypePull, Flags: wire.FlagNow, Reference: number}, nil)
	first, second := p.ranks[0].Take()[0], p.ranks[1].Take()[0]
	if first.Codec != wire.CodecDeclared || !slices.Equal(first.Payload, second.Payload) || first.Reference != second.Reference || first.Reference == number {
		t.Errorf("%+v and %+v", first.Header, second.Header)
	}
	p.serve(1, wire.Header{Type: wire.TypePull, Flags: wire.FlagNow, Reference: number}, nil)
	if again := p.ranks[1].Take()[0]; again.Codec != wire.CodecPlain {
		t.Errorf("a rank with an old copy gets %+v", again.Header)
	}
}

// Numbers of copies start anew after the greatest, and 0 stays that of none.
func TestNoCopyHasTheNumberOfNone(t *testing.T) {
	p := newPlay(t, "asp", func(w *wire.Tensor) { w.Codec = "int8:block=8" })
	p.push(0, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	p.pull(1, wire.FlagDeclare)
	p.pull(2, wire.FlagDeclare)
	number := p.ranks[1].Take()[0].Reference
	p.room.All()[0].state.deltas.numbers = math.MaxUint32 - 1
	for _, want := range []uint32{math.MaxUint32, 1, 2} {
		p.serve(1, wire.Header{Type: wire.TypePull, Flags: wire.FlagNow, Reference: number}, nil)
		h := p.ranks[1].Take()[0].Header
		if number = h.Reference; h.Codec != wire.CodecDeclared || number != want {
			t.Fatalf("%+v where a delta to copy %d was expected", h, want)
		}
	}
}

func TestWhatIsNoRequestOfAHeldValueIsAnError(t *testing.T) {
	p := newPlay(t, "asp", nil)
	for _, h := range []wire.Header{
		{Type: wire.TypePush, DType: units.Int32}, {Type: wire.TypePush, DType: units.Float32, Part: 1},
		{Type: wire.TypeRestore}, {Type: wire.TypeReport}, // which has an entrance of its own
	} {
		if err := p.room.Serve(p.ranks[0].Request(h, roomtest.Floats(n, 1), 4*n)); err == nil {
			t.Errorf("%v is served", fmt.Sprint(h.Type))
		}
	}
}

// A request that passed the shell before its tensor was given up is answered, and takes no memory.
func TestAValueIsNotMadeAfterItsTensorWasGivenUp(t *testing.T) {
	p := newPlay(t, "asp", nil)
	p.tensor.GiveUp(0)
	p.room.Cancel(0, inprocess.ErrCancelled)
	p.push(2, 0, wire.FlagDeclare, roomtest.Floats(n, 1))
	p.pull(2, wire.FlagDeclare)
	answers := p.ranks[2].Take()
	if len(answers) != 2 || answers[0].Err == nil || answers[1].Err == nil {
		t.Errorf("%+v, want two errors", answers)
	}
	p.shell.CheckMemory(t)
}

// An optimizer that has ended leaves its values on the servers: those of the next are watched then.
func TestAnotherValueLeadsWhereNobodyPushesTheLead(t *testing.T) {
	model, err := condition.Parse("dsps:3,15")
	if err != nil {
		t.Fatal(err)
	}
	old, young := new(value), new(value)
	tuner := &tuner{model: model, machine: condition.NewTuning(model), seen: map[*value]uint64{}, lead: old, members: []*value{old, young}}
	for step := range 5 {
		tuner.tune(old, 0, uint64(step), false)
		if tuner.tune(young, 0, uint64(step), true); tuner.lead != old {
			t.Fatal("the lead is pushed, and another leads")
		}
	}
	if tuner.tune(young, 0, 5, true); tuner.lead != young {
		t.Error("nobody pushes the lead, and it stays")
	}
}

// A tuner watches a value that ranks push: one that was given up would never have it tune.
func TestATunerLeavesOutAValueThatWasGivenUp(t *testing.T) {
	p := newPlay(t, "asp", nil)
	p.declare()
	model, err := condition.Parse("dsps:0,2")
	if err != nil {
		t.Fatal(err)
	}
	p.room.Cancel(0, inprocess.ErrCancelled)
	p.room.Change(room.Change{In: condition.SetPull(model.Pull), Pull: &model})
	if tuner := p.room.tuners.all[tuned{0, model.Name}]; tuner == nil || tuner.lead != nil {
		t.Errorf("tuner %+v", tuner)
	}
}

// The same for reads of iterations that never close, and for one read again and again.
func TestPullsThatAreNeverAnsweredEndAtTheMemoryLimit(t *testing.T) {
	p := newPlay(t, "ssp:1", nil)
	p.declare()
	for i := range 3 << 20 / room.WaitingBytes {
		p.serve(1, wire.Header{Type: wire.TypePull, Iteration: uint64(2 + i%2*i), Seq: uint64(i)}, nil)
	}
	if lent := p.shell.Round.Pool.Lent(); lent > 1<<20 {
		t.Errorf("%d bytes are in use, limit %d", lent, 1<<20)
	}
	if said := p.shell.Said(); len(said) == 0 || !strings.Contains(said[0], "memory limit is reached") {
		t.Errorf("the shell hears %.300q", said)
	}
}
