package server

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// push has every rank push a message of ones, and gives the length of the answer.
func (b *bench) push(t *wire.Tensor, n int, iteration uint64, had uint32) int {
	b.t.Helper()
	c, err := codec.Parse(t.Codec)
	if err != nil {
		b.t.Fatal(err)
	}
	message := make([]byte, c.MaxEncoded(n))
	message = message[:c.Encode(message, ones(n), make([]byte, c.ResidualBytes(n)), codec.Stream{Iteration: iteration})]
	for rank := range 3 {
		h := wire.Header{Type: wire.TypePush, Tensor: t.ID, DType: units.Float32, Codec: wire.CodecDeclared, Iteration: iteration}
		if rank == 1 {
			h.Before = had
		}
		b.send(rank, h, message)
	}
	var length int
	for rank := range 3 {
		h, payload := b.receive(rank)
		if h.Type != wire.TypeResult {
			b.t.Fatalf("rank %d: %v %s", rank, h.Type, payload)
		}
		length = len(payload)
	}
	return length
}

// The warm-up of answers goes on from where the rank says that knows of most iterations.
func TestAnswersGoOnWithTheirWarmUp(t *testing.T) {
	const n = 1000
	b := newBench(t, 1<<20, false)
	sum := coded("topk:0.01,warmup=8", declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4*n))
	restored := sum
	restored.ID, restored.Name = 2, "restored"
	b.announce(sum)
	b.announce(restored)
	if first, ninth := b.push(&sum, n, 0, 0), b.push(&restored, n, 0, 8); first < 20*ninth {
		t.Errorf("a first answer of %d bytes, and one of %d after 8 iterations before: want 25 times less", first, ninth)
	}
}

// Of a held value the warm-up goes by the ranks' iterations, not by the pushes of all of them.
func TestDifferencesGoOnWithTheirWarmUp(t *testing.T) {
	const n = 1000
	b := newBench(t, 1<<20, false)
	read := func(id uint32, had uint32) (lengths []int) {
		held := coded("topk:0.01,warmup=4", under("", declared(id, string(rune('a'+id)), units.Accumulate, units.Sum, units.Float32, 4*n)))
		b.announce(held)
		reference := b.hold(id, n, had)
		c, _ := codec.Parse(held.Codec)
		message := make([]byte, c.MaxEncoded(n))
		message = message[:c.Encode(message, ones(n), make([]byte, c.ResidualBytes(n)), codec.Stream{})]
		for i := range uint64(6) {
			for rank := range 3 {
				h := wire.Header{Type: wire.TypePush, Tensor: id, DType: units.Float32, Codec: wire.CodecDeclared, Iteration: i, Reference: reference}
				if rank > 0 {
					h.Flags = wire.FlagNoPull
				}
				b.send(rank, h, message)
			}
			h, payload := b.receive(0)
			if h.Type != wire.TypeResult {
				t.Fatalf("%v %s", h.Type, payload)
			}
			reference = h.Reference
			lengths = append(lengths, len(payload))
		}
		return lengths
	}
	fresh, restored := read(1, 0), read(2, 4)
	if fresh[2] < 2*restored[2] || fresh[5] != restored[5] { // the first is the value itself
		t.Errorf("answers of %v bytes, and of %v after a warm-up before", fresh, restored)
	}
}

// The threshold of a gate for pulls goes on with its decay.
func TestAGateForPullsGoesOnWithItsDecay(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	read := func(id, had uint32) wire.Header {
		held := coded("none", under("asp", declared(id, string(rune('a'+id)), units.Accumulate, units.Sum, units.Float32, 4*n)))
		held.PullGate = options.Gate{Threshold: 4, Decay: 1}
		b.announce(held)
		reference := b.hold(id, n, had)
		b.send(2, wire.Header{Type: wire.TypePush, Tensor: id, DType: units.Float32, Codec: wire.CodecDeclared, Reference: reference}, ones(n))
		h, _ := b.receive(2)
		return h
	}
	fresh, restored := read(1, 0), read(2, 1000)
	if fresh.Type != wire.TypeResult || fresh.Flags&wire.FlagEmpty == 0 || restored.Type != wire.TypeResult || restored.Flags&wire.FlagEmpty != 0 {
		t.Errorf("a change by a part is answered by %+v at first, by %+v after 1000 iterations", fresh, restored)
	}
}

func TestAResidualComesBackAsItWasSet(t *testing.T) {
	const n = 300 << 10 // more than what is read at a time
	b := newBench(t, 1<<24, false)
	w := coded("topk:0.5", declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4*n))
	b.announce(w)
	ask := func() []byte {
		b.send(2, wire.Header{Type: wire.TypeState, Tensor: 1, Iteration: 1}, nil)
		h, payload := b.receive(2)
		if h.Type != wire.TypeResult || h.Tensor != 1 || h.Iteration != 1 {
			t.Fatalf("%+v", h)
		}
		return payload
	}
	if r := ask(); len(r) != 0 {
		t.Errorf("%d bytes of residual before there is one", len(r))
	}
	all := ones(n)
	for _, first := range []int{100, 0} {
		b.send(1, wire.Header{Type: wire.TypeRestore, Tensor: 1, DType: units.Float32, Offset: uint32(first)}, all[4*first:])
		if h, payload := b.receive(1); h.Type != wire.TypeResult || len(payload) != 0 {
			t.Fatalf("%+v %s", h, payload)
		}
		if r := ask(); len(r) != 4*n || r[4*n-1] != 0x3f || (r[3] == 0x3f) != (first == 0) {
			t.Errorf("set from element %d on: %d bytes, which begin with % x", first, len(r), r[:4])
		}
	}
	b.push(&w, n, 0, 0) // 3 from the ranks for half of the elements, and the residual
	r := ask()
	if sum := ones(n); string(r) == string(sum) {
		t.Error("the answer has left the residual as it was")
	}
}

// Under drop-stragglers a sum may close before a rank's piece has come: what its answer lacked is kept besides.
func TestAPieceThatComesAfterAnAnswerIsAdded(t *testing.T) {
	const n = 1000
	b := newBench(t, 1<<20, false)
	w := coded("topk:0.01", declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4*n))
	b.announce(w)
	b.push(&w, n, 0, 0) // the answer has all of the sum, a hundredth of the elements
	piece := ones(n)
	for range 2 {
		b.send(1, wire.Header{Type: wire.TypeRestore, Tensor: 1, DType: units.Float32}, piece)
		b.receive(1)
	}
	b.send(2, wire.Header{Type: wire.TypeState, Tensor: 1, Iteration: 1}, nil)
	_, payload := b.receive(2)
	two := make([]byte, 4*n)
	for i := range n {
		binary.LittleEndian.PutUint32(two[4*i:], math.Float32bits(2))
	}
	if string(payload) != string(two) {
		t.Errorf("after two pieces of ones the residual begins with % x", payload[:8])
	}
}

// What does not lie within the residual, or is of what keeps none, ends the connection before memory is taken.
func TestAPieceThatIsNoneIsRefused(t *testing.T) {
	const n = 64
	for what, h := range map[string]wire.Header{
		"too long":       {Type: wire.TypeRestore, Tensor: 1, Offset: 1},
		"beyond the end": {Type: wire.TypeRestore, Tensor: 1, Offset: 1<<30 + 1},
		"plain":          {Type: wire.TypeRestore, Tensor: 2},
		"no residual":    {Type: wire.TypeRestore, Tensor: 3},
		"held":           {Type: wire.TypeRestore, Tensor: 4},
		"a plain state":  {Type: wire.TypeState, Tensor: 2},
		"not announced":  {Type: wire.TypeState, Tensor: 9},
	} {
		b := newBench(t, 1<<20, false)
		b.announce(coded("topk:0.5", declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4*n)))
		b.announce(declared(2, "plain", units.Allreduce, units.Sum, units.Float32, 4*n))
		b.announce(coded("int8", declared(3, "no residual", units.Allreduce, units.Sum, units.Float32, 4*n)))
		b.announce(coded("topk:0.5", under("asp", declared(4, "held", units.Accumulate, units.Sum, units.Float32, 4*n))))
		var payload []byte
		if h.Type == wire.TypeRestore {
			payload = ones(n)
		}
		_ = b.offer(0, h, payload)
		if got, text := b.receive(1); got.Type != wire.TypeLost {
			t.Errorf("%s: rank 1 hears %v %s", what, got.Type, text)
		}
		if lent := b.s.pool.Lent(); lent >= 4<<10 { // the tensors themselves cost less, a buffer costs as much
			t.Errorf("%s: %d bytes lent", what, lent)
		}
	}
}
