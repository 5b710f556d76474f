package wire

import (
	"encoding/binary"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
)

// Cover says what a held value has in it, of an elastic job, and under which conditions it is used: little-endian, the closed iterations, the number of ranks, these,
// then the changes.
type Cover struct {
	Closed  uint64             // iterations
	Ranks   []CoveredPushes    // in their order, each once
	Changes []ChangedCondition // in the order in which they were made
}

// CoveredPushes is what a held value has of a rank that has declared it.
type CoveredPushes struct {
	Rank   uint16
	Next   uint64 // its operations on the value before this one are decided
	Pushed uint64 // iterations
}

// ChangedCondition is a pull or push condition that the user has set in the place of that of the declaration.
type ChangedCondition struct {
	At    uint64 // closed iterations from which it holds
	Pull  bool
	Model string // that it is of
}

const (
	coverSize   = 8 + 2
	coveredSize = 2 + 8 + 8
	changedSize = 8 + 1 + 2 // and the model
)

// Append appends the encoded payload to b.
func (c Cover) Append(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint16(le.AppendUint64(b, c.Closed), uint16(len(c.Ranks)))
	for _, r := range c.Ranks {
		b = le.AppendUint64(le.AppendUint64(le.AppendUint16(b, r.Rank), r.Next), r.Pushed)
	}
	for _, change := range c.Changes {
		pull := byte(0)
		if change.Pull {
			pull = 1
		}
		b = le.AppendUint16(append(le.AppendUint64(b, change.At), pull), uint16(len(change.Model)))
		b = append(b, change.Model...)
	}
	return b
}

// Decode reads the payload.
func (c *Cover) Decode(b []byte) error {
	le := binary.LittleEndian
	if len(b) < coverSize {
		return fmt.Errorf("bad cover payload of %d bytes", len(b))
	}
	n := int(le.Uint16(b[8:]))
	if n > limits.MaxRanks || len(b) < coverSize+n*coveredSize {
		return fmt.Errorf("bad cover payload of %d bytes, for %d ranks", len(b), n)
	}
	*c = Cover{Closed: le.Uint64(b), Ranks: make([]CoveredPushes, n)}
	for i := range c.Ranks {
		at := b[coverSize+i*coveredSize:]
		r := CoveredPushes{Rank: le.Uint16(at), Next: le.Uint64(at[2:]), Pushed: le.Uint64(at[10:])}
		if r.Rank >= limits.MaxRanks || i > 0 && r.Rank <= c.Ranks[i-1].Rank {
			return fmt.Errorf("bad cover payload: rank %d in place %d", r.Rank, i)
		}
		if r.Pushed > c.Closed && r.Pushed-c.Closed > limits.MaxLead {
			return fmt.Errorf("bad cover payload: %d pushes of rank %d, %d iterations are closed", r.Pushed, r.Rank, c.Closed)
		}
		c.Ranks[i] = r
	}
	for b = b[coverSize+n*coveredSize:]; len(b) > 0; {
		if len(b) < changedSize || len(c.Changes) == limits.MaxChanges {
			return fmt.Errorf("bad cover payload: %d bytes behind %d changes", len(b), len(c.Changes))
		}
		size := int(le.Uint16(b[9:]))
		if b[8] > 1 || size > limits.MaxSync || len(b) < changedSize+size {
			return fmt.Errorf("bad cover payload: a change to a model of %d bytes, kind %d, in %d", size, b[8], len(b))
		}
		c.Changes = append(c.Changes, ChangedCondition{At: le.Uint64(b), Pull: b[8] == 1, Model: string(b[changedSize : changedSize+size])})
		b = b[changedSize+size:]
	}
	return nil
}
