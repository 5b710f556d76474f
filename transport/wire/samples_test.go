package wire

import (
	"time"

	"github.com/valyala/bytebufferpool"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
)

// sample is one frame of the golden file, which also seeds the fuzz targets.
type sample struct {
	name    string
	header  Header
	payload any // []byte as it is, nil for none, of a fixed size, else JSON
}

// fixed is a payload of a fixed size.
type fixed interface{ Append(b []byte) []byte }

// json reports whether the payload is.
func (s sample) json() bool {
	switch s.payload.(type) {
	case nil, []byte, fixed:
		return false
	}
	return true
}

// bytes is the whole frame.
func (s sample) bytes() []byte {
	switch payload := s.payload.(type) {
	case nil:
		return AppendFrame(nil, s.header, nil)
	case []byte:
		return AppendFrame(nil, s.header, payload)
	case fixed:
		return AppendFrame(nil, s.header, payload.Append(nil))
	default:
		var frame bytebufferpool.ByteBuffer
		if err := AppendJSON(&frame, s.header, payload); err != nil {
			panic(err)
		}
		return frame.B
	}
}

var (
	push = Header{Type: TypePush, Flags: FlagHome, DType: units.Float32, Epoch: 1, Tensor: 2, Part: 3, Rank: 4,
		Iteration: 5, Seq: 6, Significance: 0.5}
	pull   = Header{Type: TypePull, Epoch: 1, Tensor: 2, Part: 3, Rank: 4, Iteration: 5}
	tensor = Tensor{ID: 2, Name: "layer1.weight", Kind: units.Allreduce, Op: units.Average, DType: units.Float32, Shape: []int64{10, 4},
		Ranks: []int{0, 1, 2}, Prescale: 1, Postscale: 0.5, Generation: 1, Parts: []uint32{128, 32}}
	coded = Tensor{ID: 3, Name: "layer2.weight", Kind: units.Accumulate, Op: units.Sum, DType: units.Float16, Shape: []int64{9}, Root: 1,
		Ranks: []int{0, 1}, Prescale: 1, Postscale: 1, Parts: []uint32{18},
		Declared: options.Declared{Sync: options.Sync{Model: "ssp:3", SoftPark: true}, Codec: "topk:0.01+s2"}}
	worker = Node{Role: RoleWorker, Rank: 1, LocalRank: 1, LocalSize: 2, Host: "node7", PID: 4711, Addresses: address.List{{Kind: "tcp", At: "10.0.0.7:40000"}}, Version: "0.1.0"}
	roster = Roster{Round: 77, Epoch: 1, Workers: []Node{worker}, Servers: []Node{worker}}
)

// samples has every frame type, and every kind of control message.
var samples = []sample{
	{"hello", Header{Type: TypeHello}, Hello{Role: RoleWorker, Round: 77, Rank: 3, Conns: 2}},
	{"welcome", Header{Type: TypeWelcome}, nil},
	{"announce", Header{Type: TypeAnnounce, Tensor: 2}, tensor},
	{"push", push, []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40}},
	{"pull", pull, nil},
	{"result", Header{Type: TypeResult, DType: units.Float32, Epoch: 1, Tensor: 2, Part: 3, Iteration: 5, Divisor: 2, Wait: 1500}, []byte{0, 0, 0x40, 0x40}},
	{"announce: coded", Header{Type: TypeAnnounce, Tensor: 3}, coded},
	{"push: coded", Header{Type: TypePush, Flags: FlagPlain, DType: units.Float16, Codec: CodecDeclared, Tensor: 3, Rank: 1, Iteration: 5, Seq: 6, Reference: 4, Before: 7},
		[]byte{0, 0, 1, 0, 0, 0, 3, 0, 0, 0, 0x80, 0x3f}},
	{"push: empty", Header{Type: TypePush, Flags: FlagEmpty | FlagHome, DType: units.Float32, Tensor: 2, Rank: 1, Iteration: 5, Seq: 6}, nil},
	{"push: in place", Header{Type: TypePush, Flags: FlagInPlace, DType: units.Float32, Tensor: 2, Rank: 1, Iteration: 5, Seq: 6}, Place{1 << 20, 1 << 21, 4096}.Append(nil)},
	{"released", Header{Type: TypeReleased, Tensor: 2, Part: 3, Iteration: 5, Seq: 6}, nil},
	{"put", Header{Type: TypePut, DType: units.Uint8, Tensor: 2, Rank: 1, Iteration: 5, Source: 1, Destination: EveryRank}, []byte("abc")},
	{"get", Header{Type: TypeGet, Tensor: 2, Rank: 2, Iteration: 5, Source: 1, Destination: 2}, nil},
	{"window", Header{Type: TypeWindow}, Window{1 << 40}},
	{"fail", Header{Type: TypeFail, Tensor: 2}, Failure{Code: units.FailMismatch, Name: "layer1.weight", ProcessSet: 1, Generation: 1, Seq: 6,
		Text: `"layer1.weight": rank 0 brought float32 [10, 4], rank 1 float32 [4]`}},
	{"fail: undeclared", Header{Type: TypeFail, Epoch: 1, Rank: 1, Seq: 6}, Failure{Code: units.FailStall, Name: "layer1.weight", ProcessSet: 1, Generation: 1, Seq: 6,
		Text: `"layer1.weight" could not be declared on rank 1`, Ranks: []int{0, 1}}},
	{"fail: late", Header{Type: TypeFail, Epoch: 1, Rank: 1, Seq: 6}, Failure{Code: units.FailStall, Name: "layer1.weight", ProcessSet: 1, Generation: 1, Seq: 6,
		Text: `allreduce of "layer1.weight" on rank 1 has waited 2s for its end, its timeout`, Ranks: []int{0, 1}, Late: true}},
	{"cancel", Header{Type: TypeCancel, Tensor: 2, Rank: 1, Iteration: 5}, nil},
	{"join", Header{Type: TypeJoin, Rank: 1}, nil},
	{"joined", Header{Type: TypeJoined, Rank: 3}, nil},
	{"stall", Header{Type: TypeStall, Tensor: 2}, Stall{Name: "layer1.weight", Waiting: []int{0, 2}, Missing: []int{1, 3}, Seconds: 60}},
	{"lost", Header{Type: TypeLost}, Lost{Role: RoleWorker, Rank: 1, Why: "10.0.0.7:5 closed the connection", Round: 77}},
	{"batch", Header{Type: TypeBatch}, pull.Append(pull.Append(nil))},
	{"data", Header{Type: TypeData, Flags: FlagAuthenticated}, []byte("four")},
	{"control: register", Header{Type: TypeControl}, Control{ID: 1, Wait: 30, Register: &Register{Node: worker, Workers: 2, Dedicated: 1,
		Placement: "largest-first", Known: &Known{Roster: roster, Tensors: []Tensor{tensor}, Placed: []Placed{{ID: 2, Servers: []int{0, 0}}},
			Sets: []ProcessSet{{ID: 1, Ranks: []int{0, 1}}}, SetCalls: 1}}}},
	{"control: roster", Header{Type: TypeControl}, Control{ID: 1, Roster: &roster}},
	{"control: declare", Header{Type: TypeControl}, Control{ID: 2, Declare: []Tensor{tensor}}},
	{"control: placed", Header{Type: TypeControl}, Control{ID: 2, Placed: []Placed{{ID: 2, Servers: []int{0, 1}}}}},
	{"control: refused", Header{Type: TypeControl}, Control{ID: 2, Error: "process set 7 is not known"}},
	{"control: add set", Header{Type: TypeControl}, Control{ID: 3, Position: 1, AddSet: []int{0, 1}}},
	{"control: set", Header{Type: TypeControl}, Control{ID: 3, Set: &ProcessSet{ID: 1, Ranks: []int{0, 1}}}},
	{"control: remove set", Header{Type: TypeControl}, Control{ID: 4, Position: 2, RemoveID: 1}},
	{"control: lost", Header{Type: TypeControl}, Control{Lost: &Lost{Role: RoleServer, Rank: 1, Why: "no beat for 10s"}}},
	{"control: clock", Header{Type: TypeControl}, Control{Clock: &Clock{Sent: 1, Scheduler: 2}}},
	{"control: bye", Header{Type: TypeControl}, Control{Bye: true}},
	{"control: profile", Header{Type: TypeControl}, Control{Profile: &Profile{Round: 77, Servers: []Sample{{Server: 1, Alpha: 1e-9, Beta: 0.001, Bytes: 1 << 20, Seconds: 0.5, Error: 1e-5}}}}},
	{"control: status", Header{Type: TypeControl}, Control{ID: 5, Status: &StatusReply{State: "running", Roster: &roster, Tensors: 1, Uptime: 1.5}}},
	{"control: seat asked", Header{Type: TypeControl}, Control{ID: 6, Seat: &Seat{Process: 3, State: true, Commits: 7, Skip: true}}},
	{"control: seat asked early", Header{Type: TypeControl}, Control{ID: 6, Seat: &Seat{Process: 4, Early: true}}},
	{"control: news asked", Header{Type: TypeControl}, Control{ID: 7, Seat: &Seat{Process: 3, Watch: true, News: 4}}},
	{"control: seat", Header{Type: TypeControl}, Control{ID: 6, Seat: &Seat{Process: 3, News: 5, Env: map[string]string{"PACELINE_RANK": "0"}}}},
	{"control: no seat", Header{Type: TypeControl}, Control{ID: 6, Seat: &Seat{Process: 3, Why: "a has no slot for it any more"}}},
	{"epoch", Header{Type: TypeEpoch, Epoch: 4, Tensor: 2, Part: 1, Iteration: 5}, nil},
	{"bye", Header{Type: TypeBye}, nil},
	{"condition", Header{Type: TypeCondition, Rank: 1}, Condition{ID: 1, At: 7, Names: []string{"w.*"}, Pull: "ssp:3", Push: "bsp"}},
	{"report", Header{Type: TypeReport, Flags: FlagHome | FlagLast, Epoch: 1, Tensor: 2, Rank: 1, Iteration: 4}, Report{3, 250 * time.Millisecond, 0.5}},
	{"stop", Header{Type: TypeStop, Tensor: 2, Iteration: 4}, Stop{Last: 7, S: 3, W: 10}},
	{"state", Header{Type: TypeState, Epoch: 1, Tensor: 3, Part: 1, Rank: 1, Iteration: 5}, nil},
	{"restore", Header{Type: TypeRestore, DType: units.Float32, Epoch: 1, Tensor: 3, Part: 1, Rank: 1, Offset: 6}, []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40}},
	{"beat", Header{Type: TypeBeat}, nil},
	{"send", Header{Type: TypeSend, DType: units.Uint8, Rank: 1, Iteration: 1<<63 | 7, Seq: 4, Source: 1, Destination: 2}, []byte("abc")},
	{"offer", Header{Type: TypeOffer, DType: units.Uint8, Rank: 1, Iteration: 7, Seq: 5, Source: 1, Destination: 2}, Offer{Bytes: 64 << 20, Step: 4 << 20}},
	{"receive", Header{Type: TypeReceive, Rank: 2, Iteration: 7, Seq: 6, Source: EveryRank, Destination: 2}, Receive{Bytes: 3}},
	{"match", Header{Type: TypeMatch, Rank: 2, Iteration: 7, Seq: 5, Source: 1, Destination: 2}, Match{Outcome: WrongLength, Sent: 64 << 20, Room: 3, SentAs: units.Float32, RoomAs: units.Int8}},
	{"taken", Header{Type: TypeTaken, Rank: 1, Iteration: 7, Seq: 6, Source: EveryRank, Destination: 2}, Taken{Number: 5, Oldest: 3}},
	{"piece", Header{Type: TypePiece, DType: units.Uint8, Part: 15, Rank: 1, Iteration: 7, Seq: 5, Source: 1, Destination: 2}, []byte("abc")},
	{"withdraw", Header{Type: TypeWithdraw, Rank: 1, Iteration: 7, Seq: 5, Source: 1, Destination: 2}, nil},
	{"moved", Header{Type: TypeMoved, DType: units.Float32, Epoch: 1, Tensor: 3, Part: 1, Iteration: 6, Seq: 7, Rank: 1}, nil},
	{"supply", Header{Type: TypeSupply, Flags: FlagHome, DType: units.Float32, Epoch: 1, Tensor: 3, Part: 1, Iteration: 5, Seq: 6, Rank: 1, Divisor: 2}, []byte{0, 0, 0x80, 0x3f}},
	{"use", Header{Type: TypeUse, Flags: FlagHome, DType: units.Float32, Epoch: 1, Tensor: 3, Iteration: 5, Seq: 6, Rank: 1}, nil},
	{"residual", Header{Type: TypeResidual, Flags: FlagLast, DType: units.Float32, Epoch: 1, Tensor: 3, Part: 1, Iteration: 5, Seq: 6, Rank: 1}, []byte{0, 0, 0x80, 0x3f}},
	{"cover", Header{Type: TypeCover, Epoch: 1, Tensor: 3, Part: 1, Iteration: 5, Seq: 6, Rank: 1}, Cover{Closed: 4, Ranks: []CoveredPushes{{0, 7, 5}, {3, 9, 6}}}.Append(nil)},
	{"condition: reply", Header{Type: TypeCondition}, ConditionReply{ID: 1, Keys: 2, Pushed: 7}},
}
