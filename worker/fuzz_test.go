package worker

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// numbering plays the scheduler: tensors get numbers in the order of their declaration.
type numbering struct{ last atomic.Uint32 }

func (n *numbering) Declare(_ context.Context, tensors []wire.Tensor) ([]wire.Placed, error) {
	placed := make([]wire.Placed, len(tensors))
	for i, t := range tensors {
		placed[i] = wire.Placed{ID: n.last.Add(1), Servers: make([]int, len(t.Parts))}
	}
	return placed, nil
}

func (n *numbering) RemoveSet(context.Context, uint32) error { return nil }

func (n *numbering) ReportLost(wire.Lost) {}

func (n *numbering) ReportProfile(wire.Profile) {}

func (n *numbering) Clock() (time.Duration, time.Duration, bool) { return 0, 0, false }

func (n *numbering) Whom() string { return "the scheduler" }

// FuzzServer has a server that knows the secret send any bytes at all over two connections, while
// operations wait for it. For every input the engine does not panic, allocates no more memory than it needs, and ends
// every operation once when the server is gone.
func FuzzServer(f *testing.F) {
	for _, s := range serverSeeds() {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		withstand(t, func(conns []transport.Conn) { transporttest.SendPieces(conns, input) })
	})
}

// FuzzAnswers has it send frames that each make sense, in any order: four bytes of input are one frame.
func FuzzAnswers(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 30 {
		input := make([]byte, 4*50)
		for i := range input {
			input[i] = byte(random.Uint32())
		}
		f.Add(input)
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		withstand(t, func(conns []transport.Conn) {
			for ; len(input) >= 4; input = input[4:] {
				_ = conns[input[3]%2].Send(net.Buffers{answerOf([4]byte(input))})
			}
		})
	})
}

// withstand runs the engine of rank 1 of 3 with one server, which the test plays, in virtual time: an operation that
// does not end costs none.
func withstand(t *testing.T, play func(conns []transport.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{})
		defer network.Close()
		secret := []byte("fuzz")
		l, err := network.Node("server", secret).Listen("server:1")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		members := membership.NewView(&membership.Epoch{Round: 7, Workers: make([]membership.Worker, 3), Servers: []membership.Server{{Rank: membership.Dedicated, Node: membership.Node{Addresses: address.List{{Kind: "twin", At: "server:1"}}}}}})
		e := New(Config{
			Rank: 1, Membership: members, Transports: transport.NewSet(nil, network.Node("worker", secret)), Control: &numbering{}, PartitionBytes: 64 << 10, Fusion: 1 << 10,
			Credit: 1 << 20, Conns: 2, DeclareTimeout: 10 * time.Second, Log: zap.NewNop(),
			Alloc: func(n int) []byte {
				if n > 1<<20 {
					return nil
				}
				return make([]byte, n)
			},
		})
		var conns []transport.Conn
		var greeted sync.WaitGroup
		greeted.Go(func() { conns = welcome(t, l) })
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := e.Start(ctx, nil); err != nil {
			t.Fatal(err)
		}
		greeted.Wait()
		done := make(chan error, 100)
		ops := slices.Concat(fuzzedOperations(done), codedOperations(done), fuzzedMessages(done))
		if err := e.Submit(ops); err != nil {
			t.Fatal(err)
		}
		play(conns)
		for _, c := range conns {
			c.Close()
		}
		for i := range ops {
			select {
			case <-done:
			case <-time.After(10 * time.Second):
				t.Fatalf("%d of %d operations have ended", i, len(ops))
			}
		}
		e.Shutdown(ctx)
		if len(done) > 0 {
			t.Error("an operation has ended twice")
		}
	})
}

// welcome accepts the engine's connections, and discards what it sends.
func welcome(t *testing.T, l transport.Listener) (conns []transport.Conn) {
	for range 2 {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return conns
		}
		conns = append(conns, c)
		if err := c.Send(net.Buffers{wire.AppendFrame(nil, wire.Header{Type: wire.TypeWelcome}, nil)}); err != nil {
			t.Error(err)
		}
		go transporttest.Drain(c)
	}
	return conns
}

// fuzzedOperations are two of each kind, under names of their own: tensors get the numbers 1 to 10.
func fuzzedOperations(done chan<- error) (ops []Op) {
	for i := range 2 {
		for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Allgather, units.Alltoall, units.Reducescatter} {
			op := Op{
				Kind: kind, DType: units.Uint8, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1, 2}}, Shape: []int64{6}, Input: make([]byte, 6),
				Prescale: 1, Postscale: 1, Name: fmt.Sprint(kind, i), Root: i, Done: func(_ Output, err error) { done <- err },
			}
			switch kind {
			case units.Allreduce, units.Broadcast:
				op.Output = make([]byte, 6)
			case units.Reducescatter:
				op.Output = make([]byte, 2)
			}
			ops = append(ops, op)
		}
	}
	return ops
}

// codedOperations are a sum of each kind and the declaration of a held value, coded: tensors 11 to 13.
func codedOperations(done chan<- error) (ops []Op) {
	for _, kind := range []units.Kind{units.Allreduce, units.Reducescatter, units.Accumulate} {
		op := Op{
			Kind: kind, DType: units.Float16, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1, 2}}, Shape: []int64{6}, Input: make([]byte, 12),
			Prescale: 1, Postscale: 1, Name: fmt.Sprint(kind, " coded"), Root: 1,
			Declared: options.Declared{Codec: `[{"min_bytes": 0, "codec": "topk:0.5+s2"}]`}, Held: Held{Use: units.Declare},
			Output: make([]byte, 12), Done: func(_ Output, err error) { done <- err },
		}
		if kind == units.Reducescatter {
			op.Output = make([]byte, 4)
		}
		ops = append(ops, op)
	}
	return ops
}

// fuzzedMessages are a short and a long message to rank 0, and receives from rank 2 and from any: tensor 0, operations 0 to 3.
func fuzzedMessages(done chan<- error) (ops []Op) {
	for i, n := range []int64{6, limits.MaxEager + 1, 6, 6} {
		op := Op{
			Kind: units.Send, DType: units.Uint8, Set: wire.ProcessSet{Ranks: []int{0, 1, 2}}, Shape: []int64{n}, Input: make([]byte, n),
			Prescale: 1, Postscale: 1, Done: func(_ Output, err error) { done <- err },
		}
		if i >= 2 {
			op.Kind, op.Root, op.Input, op.Output = units.Receive, []int{2, AnyRank}[i-2], nil, make([]byte, n)
		}
		ops = append(ops, op)
	}
	return ops
}

// answerOf makes a frame of four bytes: what, of which tensor, partition and route, how long.
func answerOf(b [4]byte) []byte {
	types := []wire.Type{wire.TypeResult, wire.TypeResult, wire.TypeResult, wire.TypeResult, wire.TypeFail, wire.TypeStall, wire.TypeJoined, wire.TypeWindow, wire.TypeEpoch, wire.TypeLost, wire.TypeBye, wire.TypeMatch, wire.TypeTaken}
	h := wire.Header{
		Type: types[int(b[0]&15)%len(types)], Tensor: uint32(b[0]>>4)%13 + 1, Codec: b[2] >> 7, Reference: uint32(b[1] % 2), Part: uint32(b[1] % 4), Seq: uint64(b[1] >> 6 / 3),
		Source: []uint16{0, 0, 2, 0, 1}[b[2]%5], Destination: []uint16{0, wire.EveryRank, 1, 1, wire.EveryRank}[b[2]%5], Rank: uint16(b[2] % 3),
	}
	if h.Type == wire.TypeMatch || h.Type == wire.TypeTaken || b[3]>>5 == 7 { // of a message
		h.Tensor, h.Part, h.Seq = 0, 0, uint64(b[1]%4)
		h.Source, h.Destination = []uint16{1, 1, 2, wire.EveryRank}[h.Seq], []uint16{0, 0, 1, 1}[h.Seq]
	}
	if h.Type == wire.TypeMatch {
		return wire.AppendFrame(nil, h, wire.Match{Outcome: wire.Outcome(b[3] % 8), Sent: uint64(b[2])}.Append(nil))
	}
	if h.Type == wire.TypeTaken {
		return wire.AppendFrame(nil, h, wire.Taken{Number: uint64(b[3]), Oldest: uint64(b[2])}.Append(nil))
	}
	if h.Type == wire.TypeResult {
		lengths := []int{6, 2, 3 * 8, 9 * 8, 0, 1, 70 << 10, 12, 25, 19}
		payload := make([]byte, lengths[int(b[3]>>1)%len(lengths)])
		for i := 0; i < len(payload); i += 8 {
			payload[i] = b[1] % 7
		}
		return wire.AppendFrame(nil, h, payload)
	}
	var notice any
	switch name := fmt.Sprint(units.Kind(b[1]%5), b[2]%2); h.Type {
	case wire.TypeFail:
		notice = wire.Failure{Code: units.FailureCode(b[3] % 6), Name: name, Seq: uint64(b[3] >> 6), Generation: uint64(b[2] % 2)}
	case wire.TypeStall:
		notice = wire.Stall{Name: name, Missing: []int{0}}
	case wire.TypeLost:
		notice = wire.Lost{Role: wire.RoleWorker, Rank: int(b[3]) - 3}
	case wire.TypeWindow:
		return wire.AppendFrame(nil, h, wire.Window{Consumed: uint64(b[3])}.Append(nil))
	default:
		return wire.AppendFrame(nil, h, nil)
	}
	payload, _ := json.Marshal(notice)
	return wire.AppendFrame(nil, h, payload)
}

// serverSeeds are what a real server sends.
func serverSeeds() (inputs [][]byte) {
	var all []byte
	for _, piece := range []struct {
		h       wire.Header
		payload []byte
	}{
		{wire.Header{Type: wire.TypeResult, Tensor: 1}, make([]byte, 6)},
		{wire.Header{Type: wire.TypeResult, Tensor: 2, Destination: wire.EveryRank}, make([]byte, 6)},
		{wire.Header{Type: wire.TypeResult, Tensor: 3}, make([]byte, 24)},
		{wire.Header{Type: wire.TypeResult, Tensor: 4}, make([]byte, 72)},
		{wire.Header{Type: wire.TypeWindow}, wire.Window{Consumed: 6}.Append(nil)},
		{wire.Header{Type: wire.TypeFail}, []byte(`{"code":1,"name":"allreduce1","seq":0,"text":"ranks disagree"}`)},
		{wire.Header{Type: wire.TypeStall}, []byte(`{"name":"allreduce1","missing":[2],"seconds":1}`)},
		{wire.Header{Type: wire.TypeLost}, []byte(`{"role":"worker","rank":2,"why":"it is gone"}`)},
		{wire.Header{Type: wire.TypeBye}, nil},
	} {
		frame := wire.AppendFrame(nil, piece.h, piece.payload)
		inputs = append(inputs, transporttest.AppendPiece(nil, 0, frame), transporttest.AppendPiece(nil, 1, transporttest.Batch(frame)))
		all = transporttest.AppendPiece(all, 0, frame)
	}
	return append(inputs, all)
}

// sized is how an operation of rank 0 ends, of two that bring 4 rows of an element each, where a server says that the sizes are these.
func sized(t *testing.T, kind units.Kind, dtype units.DType, sizes ...uint64) (failure error) {
	o := &operation{Op: Op{Kind: kind, DType: dtype, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{4}, Input: make([]byte, 4*dtype.Size()), Name: "x"}}
	o.e = New(Config{
		Membership: membership.NewView(&membership.Epoch{Workers: make([]membership.Worker, 2)}),
		Alloc: func(n int) []byte {
			t.Errorf("%v takes memory, %d bytes", kind, n)
			return nil
		},
	})
	defer o.e.Shutdown(t.Context())
	o.e.untold.Add(1)
	o.n = &nameState{Uses: agreement.NewUses[*operation, *declaration](0)}
	o.Done = func(_ Output, err error) { failure = err }
	for _, n := range sizes {
		o.sizes = binary.NativeEndian.AppendUint64(o.sizes, n)
	}
	if kind == units.Allgather {
		o.gather()
	} else {
		o.exchange()
	}
	return failure
}

// TestSizesThatAreNotThisRanksOwnAreAnError: a server must return the sizes that this rank sent.
func TestSizesThatAreNotThisRanksOwnAreAnError(t *testing.T) {
	for kind, sizes := range map[units.Kind][]uint64{units.Allgather: {77, 0}, units.Alltoall: {77, 0, 0, 0}} {
		if err := sized(t, kind, units.Uint8, sizes...); err == nil || errors.Is(err, ErrMemory) {
			t.Errorf("%v: %v, want an error about the sizes", kind, err)
		}
	}
}

// TestRowsWhoseBytesWrapAroundAreTooMany: another rank says that it brings them, and its 2^62 + 2 rows of 4 bytes count as 8 bytes.
func TestRowsWhoseBytesWrapAroundAreTooMany(t *testing.T) {
	const rows = 1<<62 + 2
	for kind, sizes := range map[units.Kind][]uint64{units.Allgather: {4 + 1, rows + 1}, units.Alltoall: {2, 2, rows, 0}} {
		if err := sized(t, kind, units.Float32, sizes...); !errors.Is(err, ErrMemory) {
			t.Errorf("%v: %v, want that it is too large", kind, err)
		}
	}
}
