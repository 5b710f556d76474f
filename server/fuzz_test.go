package server

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime/metrics"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fuzzMemory bounds the server's buffers, in bytes.
const fuzzMemory = 4 << 20

// FuzzFrames has workers that know the secret send any bytes at all, in pieces over four connections (two of rank 0, one
// each of ranks 1 and 2). Whatever comes, the server does not panic, keeps its bounds on memory, ends when it is
// closed, and has all buffers back then.
func FuzzFrames(f *testing.F) {
	for _, order := range []bool{false, true} {
		for _, s := range seeds() {
			f.Add(order, s)
		}
	}
	f.Fuzz(func(t *testing.T, inOrder bool, input []byte) {
		survive(t, inOrder, func(conns []transport.Conn) { transporttest.SendPieces(conns, input) })
	})
}

// FuzzOperations has them send frames that each make sense, in any order and company: six bytes of
// input are one frame, as long as their own memory stays within what survive allows.
func FuzzOperations(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 30 {
		input := make([]byte, 6*100)
		for i := range input {
			input[i] = byte(random.Uint32())
		}
		f.Add(random.IntN(2) == 0, input)
	}
	f.Fuzz(func(t *testing.T, inOrder bool, input []byte) {
		survive(t, inOrder, func(conns []transport.Conn) {
			for sent := 0; len(input) >= 6 && sent < 16<<20; input = input[6:] {
				conn, frame := operation([6]byte(input))
				sent += len(frame)
				_ = conns[conn].Send(net.Buffers{frame})
			}
		})
	})
}

// survive has a server of a round of three workers meet what play sends over four connections. It runs in virtual time:
// the server has done all it can when every goroutine waits, so that no input needs patience, of which a payload that
// never comes whole would use up all.
func survive(t *testing.T, inOrder bool, play func([]transport.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{})
		defer network.Close()
		secret := []byte("fuzz")
		l, err := network.Node("server", secret).Listen("server:1")
		if err != nil {
			t.Fatal(err)
		}
		s := New(Config{Log: zap.NewNop(), Memory: fuzzMemory, Fusion: 1 << 10, RankOrder: inOrder, Model: condition.BSP()})
		served := make(chan error, 1)
		go func() { served <- s.Serve(l) }()
		s.Begin(&membership.Epoch{Round: 7, Workers: make([]membership.Worker, 3)})
		before := allocated()

		conns := make([]transport.Conn, 4)
		for i, rank := range connRanks {
			conns[i] = greet(t, network.Node(fmt.Sprint("worker", i), secret), int(rank), 1+b2i(rank == 0))
		}
		play(conns)
		synctest.Wait() // all that came whole is read and answered
		for _, c := range conns {
			c.Close()
		}
		l.Close()
		s.drained(t)
		if lent := s.pool.Lent(); lent > fuzzMemory {
			t.Errorf("%d bytes lent, limit %d", lent, fuzzMemory)
		}
		s.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if lent := s.pool.Lent(); lent != 0 {
			t.Errorf("%d bytes did not come back", lent)
		}
		if used := allocated() - before; used > 64<<20 {
			t.Errorf("%d MiB allocated", used>>20)
		}
	})
}

// allocated is how many bytes this process has ever allocated.
func allocated() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// drained checks that the server reads to the end of every connection.
func (s *Server) drained(t *testing.T) {
	for _, patience := range []time.Duration{0, 20 * time.Second} {
		time.Sleep(patience)
		synctest.Wait()
		s.mu.Lock()
		n := len(s.conns)
		s.mu.Unlock()
		if n == 0 {
			return
		}
		if patience > 0 {
			t.Fatalf("%d connections do not end", n)
		}
	}
}

// connRanks are the ranks of the four connections.
var connRanks = [4]uint16{0, 0, 1, 2}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}

// greet makes a connection of a rank, and reads what the server says.
func greet(t *testing.T, tr transport.Transport, rank, conns int) transport.Conn {
	c, err := tr.Dial(t.Context(), "server:1")
	if err != nil {
		t.Fatal(err)
	}
	hello, _ := json.Marshal(wire.Hello{Role: wire.RoleWorker, Round: 7, Rank: rank, Conns: conns, Window: 1 << 20})
	if err := c.Send(net.Buffers{wire.AppendFrame(nil, wire.Header{Type: wire.TypeHello, Rank: uint16(rank)}, hello)}); err != nil {
		t.Fatal(err)
	}
	var h wire.Header
	if err := c.ReadHeader(&h); err != nil || h.Type != wire.TypeWelcome {
		t.Fatalf("no welcome: %v %v", h.Type, err)
	}
	go transporttest.Drain(c)
	return c
}

// script makes an input of frames.
type script struct{ b []byte }

func (s *script) frame(conn int, h wire.Header, payload []byte) {
	h.Rank = connRanks[conn]
	s.b = transporttest.AppendPiece(s.b, conn, wire.AppendFrame(nil, h, payload))
}

func (s *script) announce(conn int, t wire.Tensor) {
	payload, err := json.Marshal(&t)
	if err != nil {
		panic(err)
	}
	s.frame(conn, wire.Header{Type: wire.TypeAnnounce, Tensor: t.ID}, payload)
}

func declared(id uint32, name string, kind units.Kind, op units.ReduceOp, d units.DType, parts ...uint32) wire.Tensor {
	return wire.Tensor{ID: id, Name: name, Kind: kind, Op: op, DType: d, Ranks: []int{0, 1, 2}, Prescale: 0.5, Postscale: 2, Parts: parts}
}

// tensors are what the workers use: two of one name disagree, and one is too large for the server.
var tensors = []wire.Tensor{
	declared(1, "x", units.Allreduce, units.Sum, units.Float32, 8, 4),
	declared(2, "adasum", units.Allreduce, units.Adasum, units.Float16, 4),
	declared(3, "broadcast", units.Broadcast, units.Sum, units.Uint8, 5),
	declared(4, "allgather", units.Allgather, units.Sum, units.Int32, 24),
	declared(5, "barrier", units.Barrier, units.Average, units.Uint8, 0),
	declared(6, "reducescatter", units.Reducescatter, units.Max, units.BFloat16, 2, 2),
	declared(7, "x", units.Allreduce, units.Sum, units.Int32, 8),
	declared(8, "long", units.Allreduce, units.Sum, units.Uint8, 600<<10),
	under("asp", declared(9, "held", units.Accumulate, units.Average, units.Float32, 8, 4)),
	under("", declared(10, "held in step", units.Accumulate, units.Sum, units.Float16, 6)),
	under("dsps:1,3", declared(11, "held and tuned", units.Accumulate, units.Sum, units.Float64, 8)),
	under("adaptive:1,2", declared(13, "adaptive", units.Accumulate, units.Sum, units.Float32, 8)),
	under("elastic:2", declared(14, "elastic", units.Accumulate, units.Average, units.Float32, 4, 4)),
	under("drop-stragglers:2", declared(12, "dropping", units.Allreduce, units.Average, units.Float32, 8)),
	coded("topk:0.5+s2", declared(15, "coded", units.Allreduce, units.Sum, units.Float16, 64, 6)),
	coded("int8:block=8,feedback=on", under("ssp:1", declared(16, "held and coded", units.Accumulate, units.Average, units.Float64, 64, 8))),
	gated(0.5, coded("none", under("asp", declared(17, "held and gated", units.Accumulate, units.Sum, units.Float32, 64)))),
}

func gated(threshold float64, t wire.Tensor) wire.Tensor {
	t.PullGate = options.Gate{Threshold: threshold, Decay: 0.5}
	return t
}

func coded(setting string, t wire.Tensor) wire.Tensor {
	t.Codec = setting
	return t
}

// message is what a worker would push of a coded tensor, or is not that.
func message(t *wire.Tensor, part int, b byte) []byte {
	c, err := codec.Parse(t.Codec)
	if err != nil {
		panic(err)
	}
	n := int(t.Parts[part]) / t.DType.Size()
	to := make([]byte, c.MaxEncoded(n))
	m := to[:c.Encode(to, slices.Repeat([]byte{b, 1, 0, 0x3f}, n), make([]byte, c.ResidualBytes(n)), codec.Stream{})]
	switch b % 4 {
	case 0: // any bytes
		return to[:int(b)%(len(to)+1)]
	case 1:
		m[int(b)%len(m)] ^= b
	}
	return m
}

func under(sync string, t wire.Tensor) wire.Tensor {
	t.Sync = options.Sync{Model: sync, SoftPark: t.Name == "held"}
	return t
}

// summedType is the element type in which a tensor's pushes come.
func summedType(t *wire.Tensor) units.DType {
	if !t.Kind.Reduces() && t.Kind != units.Accumulate {
		return units.Int64
	}
	return t.DType
}

// operation makes a frame of six bytes: what, of which tensor, partition and iteration, over which
// connection, with which flags and route. Mostly the tensor is announced just before.
func operation(b [6]byte) (conn int, frame []byte) {
	types := []wire.Type{wire.TypePush, wire.TypePush, wire.TypePush, wire.TypePush, wire.TypePut, wire.TypeGet, wire.TypePull,
		wire.TypeCancel, wire.TypeJoin, wire.TypeBye, wire.TypeAnnounce, wire.TypeCondition, wire.TypeReport, wire.TypeState, wire.TypeRestore}
	if b[0]&15 == 0 && b[4] < 16 {
		types[0] = wire.TypeFail
	}
	if b[0]&15 == 15 {
		return int(b[1] % 4), messageFrame(b)
	}
	conn = int(b[1] % 4)
	t := tensors[(int(b[0]>>4)+int(b[2]>>7)*(len(tensors)-16))%len(tensors)]
	part := int(b[1]>>4) % len(t.Parts)
	h := wire.Header{
		Type: types[int(b[0]&15)%len(types)], Tensor: t.ID, Part: uint32(part), Rank: connRanks[conn],
		Iteration: uint64(b[2] % 4), Seq: uint64(b[2] >> 4 % 4), DType: summedType(&t), Flags: wire.Flags(b[3] % 64), Epoch: uint32(b[3] >> 7),
	}
	var payload []byte
	switch h.Type {
	case wire.TypePush:
		if payload = make([]byte, t.Parts[part]); part == 0 && b[4]%8 > 0 {
			h.Flags |= wire.FlagHome
		}
		if b[5]%4 == 1 {
			h.Flags |= wire.FlagWithin
		}
		if t.Codec != "" && h.Flags&wire.FlagDeclare == 0 {
			h.Codec, payload = wire.CodecDeclared, message(&t, part, b[5])
			h.Flags |= wire.Flags(b[4]>>7) * wire.FlagPlain
			h.Reference, h.Before = uint32(b[5]>>6), uint32(b[5]>>6)
		}
		if b[4]%16 == 5 {
			h.Flags |= wire.FlagEmpty
			h.Codec, payload = wire.CodecPlain, nil
		}
	case wire.TypePut, wire.TypeGet:
		h.DType = t.DType
		h.Source, h.Destination = wire.Route(int(b[4]%3), int(b[5]%4)-1)
		if h.Type == wire.TypePut {
			payload = make([]byte, b[5])
		}
	case wire.TypeRestore:
		h.DType, h.Offset, payload = units.Float32, uint32(b[4]%16), make([]byte, b[5])
	case wire.TypeAnnounce:
		payload, _ = json.Marshal(&t)
	case wire.TypeFail:
		payload, _ = json.Marshal(wire.Failure{Name: t.Name, ProcessSet: t.ProcessSet, Generation: t.Generation, Seq: h.Seq, Text: "undeclared", Ranks: t.Ranks[:len(t.Ranks)-int(b[5]%2)]})
	case wire.TypePull:
		h.Reference, h.Before = uint32(b[5]>>6), uint32(b[5]>>6)
	case wire.TypeReport:
		if h.Flags = reports[b[4]%8]; b[5] < 250 {
			payload = wire.Report{Interval: time.Duration(b[5]) << 24, Occupancy: float64(b[2]) / 255}.Append(nil)
		}
	case wire.TypeCondition:
		models := []string{"", "bsp", "asp", "ssp:1", "drop-stragglers:1", "expression:lead < 2;count[V] >= 1", "elastic:3", "nonsense"}
		payload, _ = json.Marshal(wire.Condition{ID: 1, Try: b[4]%2 == 0, At: uint64(b[5] % 4), Pull: models[b[4]>>1%8], Push: models[b[4]>>4%8]})
	}
	if b[5]%16 > 0 {
		announcement, _ := json.Marshal(&t)
		frame = wire.AppendFrame(nil, wire.Header{Type: wire.TypeAnnounce, Tensor: t.ID, Rank: h.Rank}, announcement)
	}
	return conn, wire.AppendFrame(frame, h, payload)
}

// messageFrame is a frame of a message between two ranks.
func messageFrame(b [6]byte) []byte {
	types := []wire.Type{wire.TypeSend, wire.TypeReceive, wire.TypeOffer, wire.TypeReceive, wire.TypePiece, wire.TypePiece, wire.TypeWithdraw, wire.TypeMatch}
	rank := connRanks[b[1]%4]
	h := wire.Header{
		Type: types[b[0]>>4%8], Rank: rank, Source: rank, Destination: uint16(b[2] % 4), Iteration: uint64(b[2] >> 7), Seq: uint64(b[3] % 8), Part: uint32(b[4] % 3),
		Flags: wire.FlagAuthenticated * wire.Flags(b[4]>>7),
	}
	const step = 5000
	size := uint64([]int{0, 7, step, step + 1, 3 * step}[b[5]%5])
	var payload []byte
	switch h.Type {
	case wire.TypeReceive:
		h.Source, h.Destination = []uint16{0, 1, 2, wire.EveryRank}[b[2]%4], rank
		payload = wire.Receive{Bytes: size}.Append(nil)
	case wire.TypeMatch:
		h.Source, h.Destination = []uint16{0, 1, 2, wire.EveryRank}[b[2]%4], rank
		payload = wire.Match{Outcome: wire.Outcome(b[5] % 8), Sent: size, Room: size}.Append(nil)
	case wire.TypeWithdraw:
		if b[4]%2 == 0 {
			h.Source, h.Destination = uint16(b[2]%3), rank
		}
	case wire.TypeOffer:
		payload = wire.Offer{Bytes: size, Step: step}.Append(nil)
	case wire.TypePiece:
		payload = make([]byte, []int{step, step, 1, 7}[b[5]>>6])
	default:
		payload = make([]byte, size)
	}
	return wire.AppendFrame(nil, h, payload)
}

// reports are the flags of ends of iterations.
var reports = [8]wire.Flags{
	wire.FlagHome, wire.FlagHome, wire.FlagHome, wire.FlagHome | wire.FlagLast, wire.FlagHome | wire.FlagLast,
	wire.FlagHome | wire.FlagLast | wire.FlagEmpty, wire.FlagLast | wire.FlagEmpty, wire.FlagEmpty,
}

// seeds are what real workers would send: every kind of collective, some of it given up, joined, ended
// by goodbyes; and what they would not.
func seeds() (inputs [][]byte) {
	ranks := []int{0, 2, 3}
	for _, last := range []wire.Type{wire.TypeBye, wire.TypeJoin, wire.TypeCancel, wire.TypePull, wire.TypeLost, wire.TypeBatch} {
		s := &script{}
		for _, t := range tensors[:6] {
			for _, c := range ranks {
				s.announce(c, t)
				for part, n := range t.Parts {
					h := wire.Header{Type: wire.TypePush, Tensor: t.ID, Part: uint32(part), DType: summedType(&t)}
					if part == 0 {
						h.Flags = wire.FlagHome
					}
					if t.Kind == units.Broadcast {
						h.Type, h.DType, h.Destination = wire.TypeGet, t.DType, wire.EveryRank
						if c == 0 {
							h.Type = wire.TypePut
						} else {
							n = 0
						}
					}
					s.frame(c, h, make([]byte, n))
				}
			}
		}
		for _, c := range ranks {
			h := wire.Header{Type: last, Tensor: 1, Iteration: 1}
			switch last {
			case wire.TypeLost:
				s.frame(c, h, []byte(`{"role":"worker","rank":1}`))
			case wire.TypeBatch:
				bye := wire.Header{Type: wire.TypeBye, Rank: connRanks[c]}
				s.frame(c, h, bye.Append(bye.Append(nil)))
			default:
				s.frame(c, h, nil)
			}
		}
		inputs = append(inputs, s.b)
	}
	s := &script{}
	huge := declared(1, "huge", units.Allreduce, units.Sum, units.Float32, 1<<30)
	for _, c := range ranks { // payloads that never come whole
		s.announce(c, huge)
		push := wire.Header{Type: wire.TypePush, Tensor: 1, Rank: connRanks[c], DType: units.Float32, Length: 1 << 30}
		s.b = transporttest.AppendPiece(s.b, c, push.Append(nil))
	}
	return append(inputs, s.b, transporttest.AppendPiece(nil, 0, []byte("garbage")))
}
