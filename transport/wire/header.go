// Package wire defines what travels between the nodes of a job: a fixed header, little-endian and
// versioned, followed by at most one payload. Data frames carry tensor bytes; control frames carry
// JSON. The package does no I/O.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

// Version is the version of the frame format. Peers of different versions refuse each other.
const Version = 2

// HeaderSize is the length of an encoded header in bytes.
const HeaderSize = 64

const magic = 0x4c50 // "PL" in little-endian order

// Type says what a frame means.
type Type uint8

// Frame types. The comment says who sends it to whom and what the payload is.
const (
	TypeHello     Type = iota + 1 // worker → server, node → scheduler: JSON Hello; first frame of a connection
	TypeWelcome                   // server → worker: the Hello was accepted
	TypeAnnounce                  // worker → server: JSON Tensor, before the first frame of that tensor on this connection
	TypePush                      // worker → server: one partition of a reduction; asks for the result unless FlagNoPull
	TypePull                      // worker → server: asks for a value that the servers hold
	TypeResult                    // server → worker: the answer to a push, pull or get
	TypePut                       // worker → server: one partition that others will get (broadcast, allgather, alltoall); with FlagHome answered by an empty result when all have it
	TypeGet                       // worker → server: asks for a partition that somebody puts
	TypeWindow                    // server → worker: Aux = payload bytes consumed so far on this connection
	TypeFail                      // server → worker: JSON Failure, one operation of one tensor failed on every rank
	TypeCancel                    // worker → server: the sender gives up this tensor; forget its keys
	TypeJoin                      // worker → server: the sender has no more data (Horovod's join)
	TypeJoined                    // server → worker: every rank has joined; Rank = the last one
	TypeStall                     // server → worker: JSON Stall, some ranks have not come for this key
	TypeLost                      // server ↔ worker: JSON Lost, a peer died; a worker sends it before it closes for that reason
	TypeBatch                     // worker ↔ server: Count small frames, one behind the other, in the payload
	TypeControl                   // node ↔ scheduler: JSON Control
	TypeEpoch                     // server → worker: the frame named by Tensor, Part, Iteration and Aux came from another epoch; Epoch is the right one
	TypeBye                       // any: the sender leaves on purpose; a connection that ends without it is a lost peer
	TypeCondition                 // worker ↔ server: JSON Condition, a change of synchronisation model; the server answers with a JSON ConditionReply
	TypeReport                    // worker → server: it has ended iteration Count of superstep Iteration, which took Aux ns, with a CPU occupancy of Significance
	TypeStop                      // server → worker: superstep Iteration ends with the receiver's iteration Count, or goes on where that is 0; Aux = Thresholds(s, w)
	TypeState                     // worker → server: asks for the residual of a key's answers; the result is empty where there is none
	TypeRestore                   // worker → server: a piece of a key's residual, float32 from element Aux on; answered by an empty result
	numTypes
)

var typeNames = [numTypes]string{"", "hello", "welcome", "announce", "push", "pull", "result", "put", "get", "window", "fail",
	"cancel", "join", "joined", "stall", "lost", "batch", "control", "epoch", "bye", "condition", "report", "stop", "state", "restore"}

func (t Type) String() string {
	if t == 0 || t >= numTypes {
		return fmt.Sprintf("type(%d)", uint8(t))
	}
	return typeNames[t]
}

// OfEpoch reports whether a frame of the type belongs to one membership epoch and has no meaning in
// another.
func (t Type) OfEpoch() bool {
	return t == TypePush || t == TypePull || t == TypePut || t == TypeGet || t == TypeCancel || t == TypeJoin || t == TypeReport ||
		t == TypeState || t == TypeRestore
}

// Flags modify a frame.
type Flags uint16

// Flag bits.
const (
	// FlagHome marks the one frame per operation that every rank sends to the tensor's home server,
	// where ranks that use one name for different operations are found out.
	FlagHome Flags = 1 << iota
	// FlagNoPull on a push: the sender does not want the result (reducescatter).
	FlagNoPull
	// FlagOwnWill on a cancel: the sender gives up without having been told of a failure, so that
	// all other ranks must be.
	FlagOwnWill
	// FlagDeclare on a push: the payload is the value that the servers are to hold; on a pull: the
	// sender waits for that; on a cancel: that is what the sender gives up, or of a sum that it declares it
	// anew because it has set a state, which fails what others have begun without.
	FlagDeclare
	// FlagNow on a push or pull of a held value: answer with the value as it is, whatever the
	// synchronisation model says.
	FlagNow
	// FlagWithin on a push of a held value: an iteration within a superstep, of which the
	// synchronisation model is told nothing.
	FlagWithin
	// FlagLast on a report: the sender's superstep ends with this iteration.
	FlagLast
	// FlagEmpty on a push: it has no payload and counts like any other; what the sender adds is zeros. On a
	// result: zeros, or of a held value what the receiver has with base Count. On a
	// report: the sender's superstep ends without a push; the frame counts as one of every partition that
	// the server holds of the tensor.
	FlagEmpty
	// FlagPlain on a push or pull of a held value: answer with the value itself, however the tensor is coded.
	FlagPlain
	// FlagAsk on a report: the sender waits for a stop, whose Count is 0 where the superstep goes on.
	FlagAsk
	knownFlags = FlagHome | FlagNoPull | FlagOwnWill | FlagDeclare | FlagNow | FlagWithin | FlagLast | FlagEmpty | FlagPlain | FlagAsk
)

// What a header's Codec says of the payload.
const (
	CodecPlain    = 0 // the elements as they are
	CodecDeclared = 1 // a message of the codec that the tensor was declared with
)

// Header is the fixed part of every frame. Fields that a type does not use are zero.
type Header struct {
	Type         Type
	Flags        Flags
	DType        units.DType // element type of the payload
	Codec        uint8       // how the payload is encoded: CodecPlain or CodecDeclared
	Epoch        uint32      // membership epoch that the sender is in
	Tensor       uint32      // number of the declared tensor
	Part         uint32      // partition of the tensor; (Tensor, Part) is the key
	Rank         uint32      // sending rank; in a result of a get the rank that put it
	Length       uint32      // payload bytes behind the header
	Iteration    uint64      // progress of the push, per tensor, counted from 0
	Seq          uint64      // how often the name was used before, whatever the signature (FlagHome)
	Aux          uint64      // put and get: Route(source, destination); window: consumed bytes; restore: first element; held values: Seq of the operation, given back in the result; report, stop: see there
	Divisor      uint32      // result: how many ranks contributed
	Significance float32     // push: |g|/|w|, for the models that ask for it; 0 where not computed
	Count        uint32      // batch: number of frames within; report, stop: iteration of a superstep, from 1; held values: number of the base that the rank has, 0 for none; push of a coded sum, declaration of a held value: iterations that the tensor had before
}

// Route packs the source and destination of a put or get. Destination -1 is "every reader".
func Route(src, dst int) uint64 { return uint64(uint32(src))<<32 | uint64(uint32(int32(dst))) }

// Endpoints unpacks what Route packed.
func Endpoints(aux uint64) (src, dst int) { return int(aux >> 32), int(int32(uint32(aux))) }

// Thresholds packs the two thresholds of the adaptive model, in iterations.
func Thresholds(s, w uint64) uint64 { return s<<32 | w&math.MaxUint32 }

// Unpacked unpacks what Thresholds packed.
func Unpacked(aux uint64) (s, w uint64) { return aux >> 32, aux & math.MaxUint32 }

// ErrCancelled is what an operation on the server in the own process ends with when it was given up.
// The reason comes as a Failure of its own.
var ErrCancelled = errors.New("the operation was given up")

// ErrHeader is wrapped by every error that decoding a header returns.
var ErrHeader = errors.New("bad frame header")

// Append appends the encoded header to b.
func (h *Header) Append(b []byte) []byte {
	var e [HeaderSize]byte
	le := binary.LittleEndian
	le.PutUint16(e[0:], magic)
	e[2] = Version
	e[3] = uint8(h.Type)
	le.PutUint16(e[4:], uint16(h.Flags))
	e[6] = uint8(h.DType)
	e[7] = h.Codec
	le.PutUint32(e[8:], h.Epoch)
	le.PutUint32(e[12:], h.Tensor)
	le.PutUint32(e[16:], h.Part)
	le.PutUint32(e[20:], h.Rank)
	le.PutUint32(e[24:], h.Length)
	le.PutUint32(e[28:], h.Divisor)
	le.PutUint64(e[32:], h.Iteration)
	le.PutUint64(e[40:], h.Seq)
	le.PutUint64(e[48:], h.Aux)
	le.PutUint32(e[56:], math.Float32bits(h.Significance))
	le.PutUint32(e[60:], h.Count)
	return append(b, e[:]...)
}

// Decode reads a header from the first HeaderSize bytes of b and checks everything that can be
// checked without knowing the tensor: magic, version, type, flags, element type and length limit.
func (h *Header) Decode(b []byte) error {
	if len(b) < HeaderSize {
		return fmt.Errorf("%w: %d bytes, need %d", ErrHeader, len(b), HeaderSize)
	}
	le := binary.LittleEndian
	if m := le.Uint16(b); m != magic {
		return fmt.Errorf("%w: magic %#04x, want %#04x (is the peer a Paceline node?)", ErrHeader, m, magic)
	}
	if b[2] != Version {
		return fmt.Errorf("%w: frame version %d, this node speaks %d; install the same release everywhere", ErrHeader, b[2], Version)
	}
	*h = Header{
		Type:         Type(b[3]),
		Flags:        Flags(le.Uint16(b[4:])),
		DType:        units.DType(b[6]),
		Codec:        b[7],
		Epoch:        le.Uint32(b[8:]),
		Tensor:       le.Uint32(b[12:]),
		Part:         le.Uint32(b[16:]),
		Rank:         le.Uint32(b[20:]),
		Length:       le.Uint32(b[24:]),
		Divisor:      le.Uint32(b[28:]),
		Iteration:    le.Uint64(b[32:]),
		Seq:          le.Uint64(b[40:]),
		Aux:          le.Uint64(b[48:]),
		Significance: math.Float32frombits(le.Uint32(b[56:])),
		Count:        le.Uint32(b[60:]),
	}
	return h.check()
}

func (h *Header) check() error {
	switch {
	case h.Type == 0 || h.Type >= numTypes:
		return fmt.Errorf("%w: unknown %v", ErrHeader, h.Type)
	case h.Flags&^knownFlags != 0:
		return fmt.Errorf("%w: unknown flags %#x in %v", ErrHeader, uint16(h.Flags&^knownFlags), h.Type)
	case !h.DType.Valid():
		return fmt.Errorf("%w: unknown %v in %v", ErrHeader, h.DType, h.Type)
	case h.Rank >= limits.MaxRanks:
		return fmt.Errorf("%w: rank %d in %v, limit %d", ErrHeader, h.Rank, h.Type, limits.MaxRanks)
	case h.Part >= limits.MaxParts:
		return fmt.Errorf("%w: partition %d in %v, limit %d", ErrHeader, h.Part, h.Type, limits.MaxParts)
	case h.Length > h.Type.maxPayload():
		return fmt.Errorf("%w: %v payload of %d bytes, limit %d", ErrHeader, h.Type, h.Length, h.Type.maxPayload())
	}
	return nil
}

// maxPayload is the greatest payload that a frame of type t may have.
func (t Type) maxPayload() uint32 {
	switch t {
	case TypePush, TypePut, TypeResult, TypeRestore:
		return limits.MaxPayload
	case TypeBatch:
		return limits.MaxBatch
	case TypeHello, TypeAnnounce, TypeFail, TypeStall, TypeLost, TypeControl, TypeCondition:
		return limits.MaxControl
	default:
		return 0
	}
}
