// Package wire defines the frames between the nodes of a job: a fixed header, little-endian and versioned,
// followed by at most one payload: tensor bytes or a codec's message (push, result, put, restore, residual), JSON, a structure of
// fixed size (window, report, stop) or the headers and the payloads of further frames (batch, data). The package does no I/O.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

// Version is the version of the frame format. Peers of different versions refuse each other.
const Version = 9

// HeaderSize is the length of an encoded header in bytes.
const HeaderSize = 64

const magic = 0x4c50 // "PL" in little-endian order

// Type is the meaning of a frame.
type Type uint8

// Frame types. The comment gives sender, receiver and payload.
const (
	TypeHello     Type = iota + 1 // worker → server, node → scheduler: JSON Hello; first frame of a connection
	TypeWelcome                   // server → worker: the Hello was accepted
	TypeAnnounce                  // worker → server: JSON Tensor, before the first frame of that tensor on this connection
	TypePush                      // worker → server: one partition of a reduction; asks for the result unless FlagNoPull
	TypePull                      // worker → server: asks for a value that the servers hold
	TypeResult                    // server → worker: the answer to a push, pull or get
	TypePut                       // worker → server: one partition that others will get (broadcast, allgather, alltoall); with FlagHome answered by an empty result when all have it
	TypeGet                       // worker → server: asks for a partition that another rank puts
	TypeWindow                    // server → worker: Window
	TypeFail                      // server → worker: JSON Failure, one operation of one tensor failed on every rank; worker → server: the sender gives up an operation whose tensor it has not declared
	TypeCancel                    // worker → server: the sender abandons this tensor; forget its keys
	TypeJoin                      // worker → server: the sender has no more data (Horovod's join)
	TypeJoined                    // server → worker: every rank has joined; Rank = the last one
	TypeStall                     // server → worker: JSON Stall, some ranks have not come for this key
	TypeLost                      // server ↔ worker: JSON Lost, a peer died; a worker sends it before it closes for that reason
	TypeBatch                     // worker ↔ server: the headers of small frames (Batch)
	TypeControl                   // node ↔ scheduler: JSON Control
	TypeEpoch                     // server → worker: the request that it identifies, as an answer does, belongs to another epoch; Epoch is the current one
	TypeBye                       // any: the sender leaves on purpose; a connection that ends without it is a lost peer
	TypeCondition                 // worker ↔ server: JSON Condition, a change of synchronisation model; the server answers with a JSON ConditionReply
	TypeReport                    // worker → server: Report of an iteration in superstep Iteration
	TypeStop                      // server → worker: Stop of superstep Iteration
	TypeState                     // worker → server: asks for the residual of a key's answers; the result is empty where there is none
	TypeRestore                   // worker → server: a piece of a key's residual, float32 from element Offset on; answered by an empty result
	TypeBeat                      // any: the sender runs; the connections' own, roles do not see it
	TypeData                      // worker ↔ server: the payloads of the frames of the batch before it
	TypeSend                      // worker → server: a message of rank Source for rank Destination, whole; answered by a match
	TypeOffer                     // worker → server: Offer, a message whose bytes stay where they are until a match asks for them
	TypeReceive                   // worker → server: Receive; rank Destination takes a message of rank Source, or EveryRank for any; answered by the result, whose Rank has sent it, or a match
	TypeMatch                     // server → worker: Match, the answer to a send, an offer, the last piece of one, or a receive that has no result; worker → server, in an elastic job: what the receiver of the message has heard of it, for its sender
	TypePiece                     // worker → server: a piece of an offered message; Part is its number
	TypeWithdraw                  // worker → server: the sender gives up the message, or the receive, that has this Seq
	TypeSupply                    // worker → server: the last result of a key that a lost server had, for ranks that have not got it; of a held value the newest that the rank has, after its cover. Server → worker: a held value that has been moved to another server, after its cover, for the rank to supply it there
	TypeUse                       // worker → server: with FlagHome, the sender uses the name; what it brings comes with the sum of its host
	TypeMoved                     // server → worker: the request that it identifies, as an answer does, is for another server: its key has been moved
	TypeCover                     // worker ↔ server: Cover of the held value in the result or supply after it
	TypeResidual                  // server → worker: the residual of a key's answers, which the receiver brings to where the key is now, before it pushes there or asks for it, or without a payload the word that it is here; worker → server: that residual
	TypeReleased                  // server → worker: the push that it identifies, with FlagInPlace, has no answer, and its memory is the worker's again
	TypeTaken                     // server → worker, in an elastic job: Taken, of which message the answer to a receive is that follows
	numTypes
)

var typeNames = [numTypes]string{"", "hello", "welcome", "announce", "push", "pull", "result", "put", "get", "window", "fail",
	"cancel", "join", "joined", "stall", "lost", "batch", "control", "epoch", "bye", "condition", "report", "stop", "state", "restore", "beat", "data",
	"send", "offer", "receive", "match", "piece", "withdraw", "supply", "use", "moved", "cover", "residual", "released", "taken"}

// Types are all frame types.
func Types() []Type {
	all := make([]Type, 0, numTypes-1)
	for t := Type(1); t < numTypes; t++ {
		all = append(all, t)
	}
	return all
}

func (t Type) String() string { return units.Text(typeNames[:], "type", t) }

// OfEpoch reports whether a frame of the type belongs to one membership epoch and has no meaning in
// another.
func (t Type) OfEpoch() bool {
	return t == TypePush || t == TypePull || t == TypePut || t == TypeGet || t == TypeCancel || t == TypeFail || t == TypeJoin || t == TypeReport ||
		t == TypeState || t == TypeRestore || t == TypeSupply || t == TypeUse || t == TypeCover || t == TypeResidual
}

// TakesCredit reports whether the payload of a frame is one that the receiver reports as consumed (Window).
func (t Type) TakesCredit() bool {
	return t == TypePush || t == TypePut || t == TypeRestore || t == TypeSend || t == TypeOffer || t == TypeReceive || t == TypePiece
}

// OfMessage reports whether a frame begins one end of a message. Such frames of a rank keep their order.
func (t Type) OfMessage() bool { return t == TypeSend || t == TypeOffer || t == TypeReceive }

// Flags modify a frame.
type Flags uint16

// Flag bits.
const (
	// FlagHome marks the one frame per operation that every rank sends to the tensor's home server, which
	// detects ranks that use one name for different operations.
	FlagHome Flags = 1 << iota
	// FlagNoPull on a push: the sender does not want the result (reducescatter).
	FlagNoPull
	// FlagOwnWill on a cancel: the sender abandons the tensor without notice of a failure, so all other
	// ranks need one. On a join, to a server that sums for its host: the join before it has failed.
	FlagOwnWill
	// FlagDeclare marks what is of a declaration: a push with the value that the servers will hold, the pull of a rank
	// that waits for that value, and a cancel that ends the declaration with all that was begun under it.
	FlagDeclare
	// FlagNow on a push or pull of a held value: answer with the current value, whatever the synchronisation
	// model says.
	FlagNow
	// FlagWithin on a push of a held value: an iteration within a superstep, which the
	// synchronisation model does not see.
	FlagWithin
	// FlagLast on a report: the sender's superstep ends with this iteration. On a supply or a residual from a server: it is about to leave.
	FlagLast
	// FlagEmpty says that there is no payload because nothing has changed: a push adds zeros, and counts like any other; a
	// result is zeros, or for a held value the receiver's reference copy; a report ends the sender's superstep in place of
	// such a push of the partition.
	FlagEmpty
	// FlagPlain on a push or pull of a held value: answer with the value itself, however the tensor is coded.
	FlagPlain
	// FlagAsk on a report: the sender waits for a stop, whose Last is 0 if the superstep continues.
	FlagAsk
	// FlagAuthenticated on a push, put or result: the payload has authentication tags (Tagged) whatever the setting, because
	// the receiver interprets it, as Python objects are unpickled.
	FlagAuthenticated
	// FlagInPlace on a push: the payload is a Place, where the tensor lies in the memory that the sender lends, and where the answer
	// belongs. On a result: the answer has been written there.
	FlagInPlace
	// FlagCopy on a residual: another rank brings it to where the key is; this one is for the receiver's checkpoint alone, and for nobody else's.
	FlagCopy
	knownFlags = FlagHome | FlagNoPull | FlagOwnWill | FlagDeclare | FlagNow | FlagWithin | FlagLast | FlagEmpty | FlagPlain | FlagAsk |
		FlagAuthenticated | FlagInPlace | FlagCopy
)

// Values of a header's Codec.
const (
	CodecPlain    = 0 // the elements as they are
	CodecDeclared = 1 // a message of the codec that the tensor was declared with
	CodecSummed   = 2 // the elements of a held value as servers add to them: a supply's
)

// Header is the fixed part of every frame. A field has one meaning in all types, and is zero where a type does not use
// it; data of one type only lie in its payload. An answer repeats the fields that identify its request: Tensor, Part,
// Iteration, Seq, Source, Destination and Offset.
type Header struct {
	Type         Type
	Flags        Flags
	DType        units.DType // element type of the payload
	Codec        uint8       // how the payload is encoded: CodecPlain, CodecDeclared or CodecSummed
	Epoch        uint32      // membership epoch that the sender is in
	Tensor       uint32      // number of the declared tensor
	Part         uint32      // which part of the tensor, or of the message, the frame is about; (Tensor, Part) is the key
	Length       uint32      // payload bytes behind the header
	Iteration    uint64      // by which frames of different ranks belong together: the number of the exchange, or superstep, of a tensor, from 0; the tag of a message
	Seq          uint64      // number of the operation among those of its name, whatever their signatures; messages have no name, and are numbered on each rank
	Rank         uint16      // the rank that the frame comes from: its sender, or in an answer the rank that made it possible (whose push or join came last, at the message's other end)
	Source       uint16      // the rank whose payload it is, of a transfer or a message; EveryRank in a receive from any; of a host's sum the rank that came to it last
	Destination  uint16      // the rank that gets it, or EveryRank
	Divisor      uint16      // result: how many ranks contributed, joined ones included; an average is divided by it already
	Offset       uint32      // element of the partition at which the payload begins (restore)
	Reference    uint32      // held values: number of the rank's reference copy, 0 for none
	Before       uint32      // iterations of a coded tensor before its declaration, from a checkpoint; of a message how many numbers the oldest is back that its sender has in flight; not of a result
	Wait         uint32      // result of a push or a pull: microseconds for which the answer waited here for other ranks (WaitOf), in the place of Before
	Significance float32     // push: |g|/|w|, for the models that ask for it; 0 where not computed
}

// WaitOf is a wait as headers tell it: a longer one than an hour or so is told as the longest.
func WaitOf(d time.Duration) uint32 { return uint32(min(max(0, d.Microseconds()), math.MaxUint32)) }

// Waited is the header's wait.
func (h *Header) Waited() time.Duration { return time.Duration(h.Wait) * time.Microsecond }

// EveryRank is the destination of a transfer to all ranks, and the source of a receive from any.
const EveryRank = math.MaxUint16

const _ = uint(EveryRank - limits.MaxRanks) // ranks fit

// Route gives the source and the destination of a transfer; destination -1 is every rank.
func Route(src, dst int) (source, destination uint16) {
	return uint16(src), uint16(dst) // -1 is EveryRank
}

// Endpoints are the ranks of a transfer, in Route's form.
func (h *Header) Endpoints() (src, dst int) {
	if h.Destination == EveryRank {
		return int(h.Source), -1
	}
	return int(h.Source), int(h.Destination)
}

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
	le.PutUint32(e[20:], h.Length)
	le.PutUint64(e[24:], h.Iteration)
	le.PutUint64(e[32:], h.Seq)
	le.PutUint16(e[40:], h.Rank)
	le.PutUint16(e[42:], h.Source)
	le.PutUint16(e[44:], h.Destination)
	le.PutUint16(e[46:], h.Divisor)
	le.PutUint32(e[48:], h.Offset)
	le.PutUint32(e[52:], h.Reference)
	if le.PutUint32(e[56:], h.Before); h.Type == TypeResult { // which has none
		le.PutUint32(e[56:], h.Wait)
	}
	le.PutUint32(e[60:], math.Float32bits(h.Significance))
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
		Length:       le.Uint32(b[20:]),
		Iteration:    le.Uint64(b[24:]),
		Seq:          le.Uint64(b[32:]),
		Rank:         le.Uint16(b[40:]),
		Source:       le.Uint16(b[42:]),
		Destination:  le.Uint16(b[44:]),
		Divisor:      le.Uint16(b[46:]),
		Offset:       le.Uint32(b[48:]),
		Reference:    le.Uint32(b[52:]),
		Before:       le.Uint32(b[56:]),
		Significance: math.Float32frombits(le.Uint32(b[60:])),
	}
	if h.Type == TypeResult {
		h.Wait, h.Before = h.Before, 0
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
	case TypePush, TypePut, TypeResult, TypeRestore, TypePiece, TypeSupply, TypeResidual:
		return limits.MaxPayload
	case TypeSend:
		return limits.MaxEager
	case TypeBatch:
		return limits.MaxBatched * HeaderSize
	case TypeData:
		return limits.MaxBatch
	case TypeWindow:
		return windowSize
	case TypeReport:
		return reportSize
	case TypeOffer:
		return offerSize
	case TypeReceive:
		return receiveSize
	case TypeMatch:
		return matchSize
	case TypeTaken:
		return takenSize
	case TypeStop:
		return stopSize
	case TypeCover:
		return coverSize + limits.MaxRanks*coveredSize + limits.MaxChanges*(changedSize+limits.MaxSync)
	case TypeHello, TypeAnnounce, TypeFail, TypeStall, TypeLost, TypeControl, TypeCondition:
		return limits.MaxControl
	default:
		return 0
	}
}
