package room

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Part is one partition of a tensor. It does not change.
type Part struct {
	*Tensor
	Number uint32
	Bytes  int     // in the tensor's type
	Coding *Coding // nil for plain

	Gathers bool // ranks bring what has any length, which is put one behind the other (wire.Rows), and not added
}

// NewPart finds a partition that a frame names, and makes its machine.
func NewPart(t *Tensor, number uint32) (*Part, *condition.Machine, error) {
	if number >= uint32(len(t.Parts)) {
		return nil, nil, fmt.Errorf("partition %d of %q, which has %d", number, t.Name, len(t.Parts))
	}
	p := &Part{Tensor: t, Number: number, Bytes: int(t.Parts[number]), Coding: newCoding(t, number), Gathers: t.gathers(number)}
	m, err := condition.New(p.Conditions())
	if err != nil {
		return nil, nil, fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	return p, m, nil
}

// Conditions are those that the tensor is declared with, for those who push the partition now.
func (p *Part) Conditions() condition.Config {
	c := condition.Config{Live: p.Live(), Model: p.Model, Dataflow: p.Dataflow()}
	if p.Sync.SoftPark {
		c.Parking = condition.SoftBarrier
	}
	return c
}

// gathers reports whether a partition is one of those in which an allgather of an elastic job moves its rows. The first one has their numbers.
func (t *Tensor) gathers(number uint32) bool {
	return t.Round.Elastic && t.Kind == units.Allgather && number > 0
}

// Confirms reports whether the pushes of a partition say only that ranks have all that an alltoall of an elastic job gives them: it does without ranks that have gone.
func (p *Part) Confirms() bool {
	return p.Round.Elastic && p.Kind == units.Alltoall && p.Number > 0
}

// Fits checks what a push says of its payload, before memory is taken for it.
func (p *Part) Fits(q *Request) error {
	n := q.Payload.Len()
	if p.Kind.HasRoot() && q.Has(wire.FlagEmpty) == (q.From() == p.Root) {
		return fmt.Errorf("a push of rank %d of %q, a %v of rank %d", q.From(), p.Name, p.Kind, p.Root)
	}
	if q.DType == p.Type {
		switch {
		case q.Has(wire.FlagEmpty):
			if n == 0 && !q.Has(wire.FlagDeclare) && q.Codec == wire.CodecPlain && (p.Reduce == units.Sum || p.Reduce == units.Average) {
				return nil
			}
		case p.Gathers:
			if n <= limits.MaxPayload && q.Codec == wire.CodecPlain {
				return nil
			}
		case p.Coding == nil || p.Held() && q.Has(wire.FlagDeclare):
			if n == p.Bytes && q.Codec == wire.CodecPlain {
				return nil
			}
		case q.Codec == wire.CodecDeclared && n <= p.Pushes.MaxEncoded(p.Coding.Elements):
			return nil
		}
	}
	text := fmt.Sprintf("%d bytes of %v for partition %d of %q, want %d of %v", n, q.DType, p.Number, p.Name, p.Bytes, p.Type)
	if p.Coding != nil {
		text += fmt.Sprintf(", or a message of %s of up to %d; they come in encoding %d", p.Pushes, p.Pushes.MaxEncoded(p.Coding.Elements), q.Codec)
	}
	return errors.New(text)
}

// Malformed says whose message cannot be read.
func (p *Part) Malformed(rank int, err error) error {
	return fmt.Errorf("partition %d, the push of rank %d on host %s: %w", p.Number, rank, p.Round.Membership.Now().Workers[rank].Host, err)
}

// Tally is what a server has counted.
type Tally struct {
	condition.Tally
	Withheld uint64 // answers to pulls that a gate held back
}

// Add adds what another has counted.
func (t *Tally) Add(n Tally) {
	t.Admitted += n.Admitted
	t.Dropped += n.Dropped
	t.Duplicate += n.Duplicate
	t.Delayed += n.Delayed
	t.Withheld += n.Withheld
}
