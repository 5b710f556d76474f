package server

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// bench is a server of three workers that the test plays, each over one connection.
type bench struct {
	t     *testing.T
	s     *Server
	conns []transport.Conn
}

func newBench(t *testing.T, memory int64, inOrder bool) *bench {
	network := transporttest.NewNetwork(transporttest.Options{})
	t.Cleanup(func() { network.Close() })
	secret := []byte("bench")
	l, err := network.Node("server", secret).Listen("server:1")
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, s: New(Config{Log: zap.NewNop(), Memory: memory, Fusion: 0, RankOrder: inOrder, Model: condition.BSP()})}
	served := make(chan error, 1)
	go func() { served <- b.s.Serve(l) }()
	var workers []membership.Worker
	for _, host := range []string{"alpha", "beta", "gamma"} {
		workers = append(workers, membership.Worker{Node: membership.Node{Host: host}})
	}
	b.s.Begin(&membership.Epoch{Round: 7, Workers: workers})
	t.Cleanup(func() {
		for _, c := range b.conns {
			c.Close()
		}
		l.Close()
		b.s.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if lent := b.s.pool.Lent(); lent != 0 {
			t.Errorf("%d bytes did not come back", lent)
		}
	})
	for rank := range 3 {
		c, err := network.Node(fmt.Sprint("worker", rank), secret).Dial(t.Context(), "server:1")
		if err != nil {
			t.Fatal(err)
		}
		b.conns = append(b.conns, c)
		hello, _ := json.Marshal(wire.Hello{Role: wire.RoleWorker, Round: 7, Rank: rank, Conns: 1})
		b.send(rank, wire.Header{Type: wire.TypeHello}, hello)
		if h, _ := b.receive(rank); h.Type != wire.TypeWelcome {
			t.Fatalf("no welcome but %v", h.Type)
		}
	}
	return b
}

func (b *bench) send(rank int, h wire.Header, payload []byte) {
	b.t.Helper()
	if err := b.offer(rank, h, payload); err != nil {
		b.t.Fatal(err)
	}
}

// offer sends a frame that the server may refuse, and so close the connection, before it has all of it.
func (b *bench) offer(rank int, h wire.Header, payload []byte) error {
	h.Rank = uint16(rank)
	return b.conns[rank].Send(net.Buffers{wire.AppendFrame(nil, h, payload)})
}

func (b *bench) announce(t wire.Tensor) {
	payload, _ := json.Marshal(&t)
	for rank := range b.conns {
		b.send(rank, wire.Header{Type: wire.TypeAnnounce, Tensor: t.ID}, payload)
	}
}

// receive is the next frame but window frames.
func (b *bench) receive(rank int) (wire.Header, []byte) {
	b.t.Helper()
	for {
		var h wire.Header
		if err := b.conns[rank].ReadHeader(&h); err != nil {
			b.t.Fatalf("rank %d: %v", rank, err)
		}
		payload := make([]byte, h.Length)
		if len(payload) > 0 {
			if err := b.conns[rank].ReadPayload(payload); err != nil {
				b.t.Fatal(err)
			}
		}
		if h.Type != wire.TypeWindow {
			return h, payload
		}
	}
}

func ones(n int) (b []byte) {
	for range n {
		b = binary.NativeEndian.AppendUint32(b, math.Float32bits(1))
	}
	return b
}

// A message that cannot be read fails the operation on every rank, whoever else has pushed, and the error says
// whose it was.
func TestAMalformedMessageFailsTheOperationOnEveryRank(t *testing.T) {
	const n = 300
	c, _ := codec.Parse("topk:0.5")
	for _, inOrder := range []bool{false, true} {
		b := newBench(t, 1<<20, inOrder)
		b.announce(coded("topk:0.5", declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4*n)))
		message := make([]byte, c.MaxEncoded(n))
		message = message[:c.Encode(message, ones(n), make([]byte, 4*n), codec.Stream{})]
		for rank := range 3 {
			m := message
			if rank == 1 {
				m = message[:len(message)-1]
			}
			b.send(rank, wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float32, Codec: wire.CodecDeclared}, m)
		}
		for rank := range 3 {
			h, payload := b.receive(rank)
			for h.Type == wire.TypeFail && !strings.Contains(string(payload), "malformed") { // of one that came too late
				h, payload = b.receive(rank)
			}
			for _, text := range []string{`\"w\" failed`, "rank 1 on host beta", "partition 0", "malformed message"} {
				if h.Type != wire.TypeFail || !strings.Contains(string(payload), text) {
					t.Errorf("in order %v, rank %d: %v %s, want %q", inOrder, rank, h.Type, payload, text)
				}
			}
		}
	}
}

// hold declares a held value of ones that had so many iterations before, and answers the number of the reference copy that every
// rank has with it.
func (b *bench) hold(id uint32, n int, had uint32) (reference uint32) {
	b.t.Helper()
	for rank := range 3 {
		h := wire.Header{Type: wire.TypePull, Tensor: id, Flags: wire.FlagDeclare | wire.FlagHome, Before: had}
		var payload []byte
		if rank == 0 {
			h.Type, h.DType, payload = wire.TypePush, units.Float32, ones(n)
		}
		b.send(rank, h, payload)
	}
	for rank := range 3 {
		h, payload := b.receive(rank)
		if h.Type != wire.TypeResult || h.Codec != wire.CodecPlain || len(payload) != 4*n {
			b.t.Fatalf("rank %d: %+v instead of the declared value", rank, h)
		}
		reference = h.Reference
	}
	return reference
}

// Ranks that the model keeps together have one reference copy, and what has changed is encoded once for all of them.
func TestADifferenceIsEncodedOnceForRanksThatHaveTheSame(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	b.announce(coded("int8:block=8", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n))))
	reference := b.hold(1, n, 0)
	if reference == 0 {
		t.Fatal("no reference copy comes with the declared value")
	}
	c, _ := codec.Parse("int8:block=8")
	for iteration := range uint64(4) {
		message := make([]byte, c.MaxEncoded(n))
		message = message[:c.Encode(message, ones(n), nil, codec.Stream{Iteration: iteration})]
		b.send(0, wire.Header{
			Type: wire.TypePush, Tensor: 1, DType: units.Float32, Codec: wire.CodecDeclared, Iteration: iteration, Flags: wire.FlagNow, Reference: reference,
		}, message)
		h, first := b.receive(0)
		if h.Codec != wire.CodecDeclared || h.Reference != reference+1 {
			t.Fatalf("iteration %d: %+v, want reference copy %d", iteration, h, reference+1)
		}
		for rank := 1; rank < 3; rank++ {
			b.send(rank, wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow, Reference: reference}, nil)
			if h, payload := b.receive(rank); h.Reference != reference+1 || !bytes.Equal(payload, first) {
				t.Fatalf("rank %d, iteration %d: %+v, %x where rank 0 got %x", rank, iteration, h, payload, first)
			}
		}
		reference++
		if n := b.s.copies.Len(); n != 1 {
			t.Fatalf("%d reference copies are kept for 3 ranks that have the same", n)
		}
	}
}

// A gate for pulls answers without a payload while less has changed than its share of the value, and what is held
// back adds up. The value is 1 and rises by 1; the gate lets through what makes it half new: 2, 4 and 8.
func TestAGateForPullsHoldsBackWhatHasChangedByLittle(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	tensor := coded("none", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n)))
	tensor.PullGate, tensor.Prescale, tensor.Postscale = options.Gate{Threshold: 0.5}, 1, 1
	b.announce(tensor)
	reference := b.hold(1, n, 0)
	for value := float32(2); value < 10; value++ {
		h := wire.Header{
			Type: wire.TypePush, Tensor: 1, DType: units.Float32, Codec: wire.CodecDeclared, Flags: wire.FlagNow, Reference: reference,
			Iteration: uint64(value) - 2,
		}
		b.send(0, h, ones(n))
		h, payload := b.receive(0)
		if value == 2 || value == 4 || value == 8 {
			if h.Codec != wire.CodecDeclared || h.Reference == reference || len(payload) != 4*n {
				t.Fatalf("value %g: %+v with %d bytes instead of the difference", value, h, len(payload))
			}
			reference = h.Reference
		} else if h.Flags != wire.FlagEmpty || h.Codec != wire.CodecDeclared || h.Reference != reference || len(payload) != 0 {
			t.Fatalf("value %g: %+v with %d bytes instead of nothing", value, h, len(payload))
		}
	}
	b.send(0, wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow | wire.FlagPlain, Reference: reference}, nil)
	if h, payload := b.receive(0); h.Codec != wire.CodecPlain || !bytes.Equal(payload[:4], binary.NativeEndian.AppendUint32(nil, math.Float32bits(9))) {
		t.Fatalf("%+v %x where the value itself was asked for", h, payload[:4])
	}
}

// An operation to which nobody has anything to add is answered without a payload.
func TestASumOfNothingIsAnsweredWithoutAPayload(t *testing.T) {
	for _, inOrder := range []bool{false, true} {
		b := newBench(t, 1<<20, inOrder)
		b.announce(declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4096))
		for iteration := range uint64(2) {
			for rank := range 3 {
				h := wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float32, Iteration: iteration, Flags: wire.FlagEmpty}
				var payload []byte
				if rank == 1 && iteration == 1 {
					h.Flags, payload = 0, ones(1024)
				}
				b.send(rank, h, payload)
			}
			for rank := range 3 {
				h, payload := b.receive(rank)
				if iteration == 0 && (h.Flags != wire.FlagEmpty || len(payload) > 0) || iteration == 1 && !bytes.Equal(payload, ones(1024)) {
					t.Fatalf("in order %v, iteration %d, rank %d: %+v with %d bytes", inOrder, iteration, rank, h, len(payload))
				}
			}
		}
	}
}

// A rank is sent a difference only to the reference copy that it says it has, whatever was lost on the way.
func TestADeltaIsSentToTheReferenceCopyThatARankHas(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	b.announce(coded("int8:block=8", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n))))
	b.hold(1, n, 0)
	read := func(rank int, reference uint32, flags wire.Flags) wire.Header {
		t.Helper()
		b.send(rank, wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow | flags, Reference: reference}, nil)
		h, payload := b.receive(rank)
		if h.Type != wire.TypeResult || h.Codec == wire.CodecPlain && len(payload) != 4*n {
			t.Fatalf("%+v with %d bytes", h, len(payload))
		}
		return h
	}
	first := read(1, 0, 0)
	second := read(1, first.Reference, 0)
	stale := read(1, first.Reference, 0) // the second was lost
	third := read(1, stale.Reference, 0)
	exact := read(1, third.Reference, wire.FlagPlain)
	fourth := read(1, exact.Reference, 0)
	for i, c := range []struct {
		h     wire.Header
		coded bool
	}{{first, false}, {second, true}, {stale, false}, {third, true}, {exact, false}, {fourth, true}, {read(2, fourth.Reference, 0), false}} {
		if c.coded != (c.h.Codec == wire.CodecDeclared) || c.h.Reference == 0 {
			t.Errorf("answer %d: %+v", i, c.h)
		}
	}
	b.send(1, wire.Header{Type: wire.TypeCancel, Tensor: 1, Seq: 9}, nil)
	h := wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow, Reference: 0, Seq: 10}
	b.send(1, h, nil)
	if got, _ := b.receive(1); got.Codec != wire.CodecPlain {
		t.Errorf("after it gave up: %+v", got)
	}
}

// Where there is no memory for reference copies, readers get the value itself.
func TestWithoutMemoryForAReferenceCopyTheValueItselfIsSent(t *testing.T) {
	const n = 1024 // 4 KiB, the least that the pool lends
	b := newBench(t, 6*4096, false)
	b.announce(coded("int8:block=8", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n))))
	b.hold(1, n, 0)
	for range 3 {
		references := make([]uint32, 3)
		for rank := range 3 {
			for range 2 {
				b.send(rank, wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow, Reference: references[rank]}, nil)
				h, payload := b.receive(rank)
				if h.Type != wire.TypeResult {
					t.Fatalf("rank %d: %v %s", rank, h.Type, payload)
				}
				references[rank] = h.Reference
			}
		}
	}
}

// A rank that reads again and again while another stays where it was costs no reference copy for each time.
func TestReferenceCopiesAreAsManyAsRanksHave(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	b.announce(coded("int8:block=8", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n))))
	reference := b.hold(1, n, 0)
	for range 50 {
		b.send(1, wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow, Reference: reference}, nil)
		h, _ := b.receive(1)
		if reference = h.Reference; h.Codec != wire.CodecDeclared {
			t.Fatalf("%+v where a difference was expected", h)
		}
		if n := b.s.copies.Len(); n > 3 {
			t.Fatalf("%d reference copies are kept for 2 that ranks have", n)
		}
	}
}

// A difference that the gate has held back is sent when the threshold has fallen to it, though nothing has changed since:
// iterations may end with empty pushes. Half of the value is new.
func TestAGateForPullsOpensAsItsThresholdFalls(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	tensor := coded("none", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n)))
	tensor.PullGate, tensor.Prescale, tensor.Postscale = options.Gate{Threshold: 2, Decay: 1}, 1, 1
	b.announce(tensor)
	reference := b.hold(1, n, 0)
	for iteration := range uint64(4) {
		for rank := range 3 {
			h := wire.Header{
				Type: wire.TypePush, Tensor: 1, DType: units.Float32, Flags: wire.FlagNow | wire.FlagEmpty, Reference: reference, Iteration: iteration,
			}
			var payload []byte
			if iteration == 0 && rank == 0 { // 1 + 1
				h.Flags, h.Codec, payload = wire.FlagNow, wire.CodecDeclared, ones(n)
			}
			b.send(rank, h, payload)
			h, _ = b.receive(rank)
			closed := iteration // iterations that all ranks have ended
			if rank == 2 {
				closed++
			}
			if held := closed < 4; held != (h.Flags == wire.FlagEmpty && h.Reference == reference) { // the threshold is 2 / closed
				t.Fatalf("iteration %d, rank %d: %+v, held back: want %v", iteration, rank, h, held)
			}
		}
	}
}

// What is too large for a reference copy is sent as it is, and a difference again when it is not.
func TestAValueThatIsNotFiniteInAReferenceCopyIsSentAsItIs(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	tensor := coded("none", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float16, 2*n)))
	tensor.PullGate, tensor.Prescale, tensor.Postscale = options.Gate{Threshold: 0.01}, 1, 1
	b.announce(tensor)
	for rank := range 3 {
		h := wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagDeclare | wire.FlagHome}
		var payload []byte
		if rank == 0 {
			h.Type, h.DType, payload = wire.TypePush, units.Float16, make([]byte, 2*n)
		}
		b.send(rank, h, payload)
	}
	for rank := range 3 {
		b.receive(rank)
	}
	reference := uint32(0)
	for i, c := range []struct {
		added  float32
		number bool   // a reference copy comes with it
		codec  uint8  // of the answer
		first  []byte // element of it
	}{
		{70000, false, wire.CodecPlain, []byte{0, 0x7c}}, // more than float16 has
		{-69999, true, wire.CodecPlain, []byte{0, 0x3c}},
		{1, true, wire.CodecDeclared, []byte{0, 0, 0x80, 0x3f}},
	} {
		h := wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float16, Codec: wire.CodecDeclared, Flags: wire.FlagNow, Reference: reference, Iteration: uint64(i)}
		var payload []byte
		for range n {
			payload = binary.NativeEndian.AppendUint32(payload, math.Float32bits(c.added))
		}
		b.send(0, h, payload)
		h, payload = b.receive(0)
		if reference = h.Reference; h.Codec != c.codec || (reference > 0) != c.number || !bytes.HasPrefix(payload, c.first) {
			t.Fatalf("after adding %g: %+v, %x, want %+v", c.added, h, payload, c)
		}
	}
}

// TestADifferenceThatItsCodecCannotSayIsNotSent: a value grows between two reads by more than float16 has.
func TestADifferenceThatItsCodecCannotSayIsNotSent(t *testing.T) {
	const n = 64
	b := newBench(t, 1<<20, false)
	tensor := coded("fp16", under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n)))
	tensor.PullGate, tensor.Prescale, tensor.Postscale = options.Gate{Threshold: 0.01}, 1, 1
	b.announce(tensor)
	for rank := range 3 {
		h := wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagDeclare | wire.FlagHome}
		var payload []byte
		if rank == 0 {
			h.Type, h.DType, payload = wire.TypePush, units.Float32, make([]byte, 4*n)
		}
		b.send(rank, h, payload)
	}
	references := make([]uint32, 3)
	for rank := range 3 {
		h, _ := b.receive(rank)
		references[rank] = h.Reference
	}
	iterations := make([]uint64, 3)
	for _, c := range []struct {
		rank  int
		added uint16 // of float16
		codec uint8  // of the answer
		first float32
	}{
		{1, 0x78e2, wire.CodecDeclared, 40000},
		{1, 0x78e2, wire.CodecDeclared, 40000}, // more
		{0, 0x3c00, wire.CodecPlain, 80001},
		{0, 0x7800, wire.CodecDeclared, 32768}, // more
	} {
		h := wire.Header{Type: wire.TypePush, Tensor: 1, DType: units.Float32, Codec: wire.CodecDeclared, Flags: wire.FlagNow, Reference: references[c.rank], Iteration: iterations[c.rank]}
		b.send(c.rank, h, bytes.Repeat(binary.NativeEndian.AppendUint16(nil, c.added), n))
		h, payload := b.receive(c.rank)
		references[c.rank], iterations[c.rank] = h.Reference, iterations[c.rank]+1
		var first float32
		if h.Codec == wire.CodecPlain {
			first = math.Float32frombits(binary.NativeEndian.Uint32(payload))
		} else {
			first = half.FromFloat16(binary.NativeEndian.Uint16(payload))
		}
		if h.Codec != c.codec || math.Abs(float64(first-c.first)) > 10 {
			t.Fatalf("rank %d adds %#04x: %+v, %g, want %+v", c.rank, c.added, h, first, c)
		}
	}
}
