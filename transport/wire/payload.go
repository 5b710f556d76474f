package wire

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"
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
	Last uint64 // iteration of the receiver in the superstep, from 1; 0: the superstep continues
	S, W uint64 // the adaptive model's thresholds of this decision
}

const (
	windowSize = 8
	reportSize = 24
	stopSize   = 24
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
func (s Stop) Append(b []byte) []byte { return appendWords(b, s.Last, s.S, s.W) }

// Decode reads the payload.
func (s *Stop) Decode(b []byte) error { return words(TypeStop, b, &s.Last, &s.S, &s.W) }

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
