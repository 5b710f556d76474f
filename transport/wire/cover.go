package wire

import (
	"encoding/binary"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
)

// Cover says what a held value has in it, of an elastic job: little-endian, the closed iterations, then the ranks.
type Cover struct {
	Closed uint64          // iterations
	Ranks  []CoveredPushes // in their order, each once
}

// CoveredPushes is what a held value has of a rank that has declared it.
type CoveredPushes struct {
	Rank   uint16
	Next   uint64 // its operations on the value before this one are decided
	Pushed uint64 // iterations
}

const (
	coverSize   = 8
	coveredSize = 2 + 8 + 8
)

// Append appends the encoded payload to b.
func (c Cover) Append(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint64(b, c.Closed)
	for _, r := range c.Ranks {
		b = le.AppendUint64(le.AppendUint64(le.AppendUint16(b, r.Rank), r.Next), r.Pushed)
	}
	return b
}

// Decode reads the payload.
func (c *Cover) Decode(b []byte) error {
	n := (len(b) - coverSize) / coveredSize
	if len(b) < coverSize || len(b) != coverSize+n*coveredSize || n > limits.MaxRanks {
		return fmt.Errorf("bad cover payload of %d bytes, want %d and %d for each rank", len(b), coverSize, coveredSize)
	}
	le := binary.LittleEndian
	c.Closed, c.Ranks = le.Uint64(b), make([]CoveredPushes, n)
	for i := range c.Ranks {
		at := b[coverSize+i*coveredSize:]
		r := CoveredPushes{Rank: le.Uint16(at), Next: le.Uint64(at[2:]), Pushed: le.Uint64(at[10:])}
		if r.Rank >= limits.MaxRanks || i > 0 && r.Rank <= c.Ranks[i-1].Rank {
			return fmt.Errorf("bad cover payload: rank %d in place %d", r.Rank, i)
		}
		c.Ranks[i] = r
	}
	return nil
}
