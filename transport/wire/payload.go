package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

// Payloads of a fixed size, little-endian as the header is. Each has Append, which appends its encoding, and Decode,
// which reads it and refuses any other length.

// Window returns credit to a worker: the bytes that the server has consumed.
type Window struct {
	Consumed uint64 // payload bytes so far, on this connection
}

// Report sends an iteration to the decider under a model with supersteps. A report with FlagEmpty has no payload.
type Report struct {
	Iteration uint64        // of the superstep, from 1
	Interval  time.Duration // its duration; 0: unknown
	Occupancy float64       // of the processors during it, from 0 to 1
}

// Stop is the decider's answer to a rank: the end of its superstep.
type Stop struct {
	Last  uint64 // iteration of the receiver in the superstep, from 1; 0: the superstep continues
	Asked uint64 // iteration at whose end the receiver asked, where this answers it; else 0
	S, W  uint64 // the adaptive model's thresholds of this decision
}

// Offer says how long a message is whose bytes are not with it, and into what pieces they are cut.
type Offer struct {
	Bytes uint64 // from 1 to limits.MaxTensor
	Step  uint64 // of each piece but the last, from 1 to limits.MaxPayload; pieces are at most limits.MaxParts
}

// Receive says how long a message has to be.
type Receive struct {
	Bytes uint64 // at most limits.MaxTensor
}

// Place is where a partition lies in the memory that its rank lends.
type Place struct {
	Input, Output uint64 // offsets in bytes
	Length        uint64 // bytes of either
}

// Match is what becomes of a message or of a receive.
type Match struct {
	Outcome Outcome
	Sent    uint64 // bytes of the message
	Room    uint64 // bytes of the receive

	// The element types of both, where they do not fit; else those of bytes.
	SentAs, RoomAs units.DType
}

// Outcome is the kind of a match.
type Outcome uint64

// Outcomes.
const (
	Delivered   Outcome = iota // the receiver has the message
	Wanted                     // the receiver waits for its bytes: send them in pieces
	WrongLength                // the two lengths differ
	Withdrawn                  // the other end has given it up
	Departed                   // the other end has gone
	NoMemory                   // the server has none for it
	Untagged                   // the receiver wants authentication tags (FlagAuthenticated), with which the bytes are not sent
	outcomes
)

// Taken is the message that a receive has taken.
type Taken struct {
	Number uint64 // that its sender has given it
	Oldest uint64 // of those that the sender has in flight, when it sent that
}

// Refusal is a match that ends an operation of the worker in the server's process without success.
type Refusal struct{ Match }

func (r Refusal) Error() string {
	return fmt.Sprintf("a message is not delivered: outcome %d", r.Outcome)
}

const (
	windowSize  = 8
	reportSize  = 24
	stopSize    = 32
	offerSize   = 16
	receiveSize = 8
	matchSize   = 24
	takenSize   = 16

	// PlaceSize is the length of an encoded Place.
	PlaceSize = 24
)

// Append appends the encoded payload to b.
func (w Window) Append(b []byte) []byte { return appendWords(b, w.Consumed) }

// Decode reads the payload.
func (w *Window) Decode(b []byte) error { return words(TypeWindow, b, &w.Consumed) }

// Append appends the encoded payload to b.
func (r Report) Append(b []byte) []byte {
	return appendWords(b, r.Iteration, uint64(r.Interval), math.Float64bits(r.Occupancy))
}

// Decode reads the payload.
func (r *Report) Decode(b []byte) error {
	var iteration, interval, occupancy uint64
	if err := words(TypeReport, b, &iteration, &interval, &occupancy); err != nil {
		return err
	}
	*r = Report{iteration, time.Duration(interval), math.Float64frombits(occupancy)}
	if r.Interval < 0 || !(r.Occupancy >= 0 && r.Occupancy <= 1) {
		return fmt.Errorf("bad report payload: an interval of %v and an occupancy of %g", r.Interval, r.Occupancy)
	}
	return nil
}

// Append appends the encoded payload to b.
func (s Stop) Append(b []byte) []byte { return appendWords(b, s.Last, s.Asked, s.S, s.W) }

// Decode reads the payload.
func (s *Stop) Decode(b []byte) error { return words(TypeStop, b, &s.Last, &s.Asked, &s.S, &s.W) }

// Append appends the encoded payload to b.
func (p Place) Append(b []byte) []byte { return appendWords(b, p.Input, p.Output, p.Length) }

// Decode reads the payload.
func (p *Place) Decode(b []byte) error { return words(TypePush, b, &p.Input, &p.Output, &p.Length) }

// Append appends the encoded payload to b.
func (o Offer) Append(b []byte) []byte { return appendWords(b, o.Bytes, o.Step) }

// Decode reads the payload.
func (o *Offer) Decode(b []byte) error {
	if err := words(TypeOffer, b, &o.Bytes, &o.Step); err != nil {
		return err
	}
	if o.Bytes == 0 || o.Bytes > limits.MaxTensor || o.Step == 0 || o.Step > limits.MaxPayload || o.Pieces() > limits.MaxParts {
		return fmt.Errorf("bad offer payload: %d bytes in pieces of %d", o.Bytes, o.Step)
	}
	return nil
}

// Pieces is the number of pieces.
func (o *Offer) Pieces() int { return int((o.Bytes + o.Step - 1) / o.Step) }

// Piece is the place of a piece in the message; an empty one where there is no such piece.
func (o *Offer) Piece(i uint32) (from, to uint64) {
	return min(uint64(i)*o.Step, o.Bytes), min((uint64(i)+1)*o.Step, o.Bytes)
}

// Append appends the encoded payload to b.
func (r Receive) Append(b []byte) []byte { return appendWords(b, r.Bytes) }

// Decode reads the payload.
func (r *Receive) Decode(b []byte) error {
	if err := words(TypeReceive, b, &r.Bytes); err != nil {
		return err
	}
	if r.Bytes > limits.MaxTensor {
		return fmt.Errorf("bad receive payload: %d bytes", r.Bytes)
	}
	return nil
}

// Append appends the encoded payload to b.
func (m Match) Append(b []byte) []byte {
	return appendWords(b, uint64(m.Outcome)|uint64(m.SentAs)<<8|uint64(m.RoomAs)<<16, m.Sent, m.Room)
}

// Append appends the encoded payload to b.
func (t Taken) Append(b []byte) []byte { return appendWords(b, t.Number, t.Oldest) }

// Decode reads the payload.
func (t *Taken) Decode(b []byte) error { return words(TypeTaken, b, &t.Number, &t.Oldest) }

// Decode reads the payload.
func (m *Match) Decode(b []byte) error {
	var outcome uint64
	if err := words(TypeMatch, b, &outcome, &m.Sent, &m.Room); err != nil {
		return err
	}
	m.Outcome, m.SentAs, m.RoomAs = Outcome(outcome&0xff), units.DType(outcome>>8), units.DType(outcome>>16)
	if m.Outcome >= outcomes || !m.SentAs.Valid() || !m.RoomAs.Valid() || outcome>>24 != 0 {
		return fmt.Errorf("bad match payload: outcome %#x", outcome)
	}
	return nil
}

func appendWords(b []byte, values ...uint64) []byte {
	for _, v := range values {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func words(t Type, b []byte, into ...*uint64) error {
	if len(b) != 8*len(into) {
		return fmt.Errorf("bad %v payload: %d bytes, want %d", t, len(b), 8*len(into))
	}
	readWords(b, into...)
	return nil
}

func readWords(b []byte, into ...*uint64) {
	for i, v := range into {
		*v = binary.LittleEndian.Uint64(b[8*i:])
	}
}
