package core

import (
	"fmt"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// coding is how the partitions of a declaration travel.
type coding struct {
	codec codec.Codec
	dtype units.DType
	parts []codedPart
}

// codedPart is what this rank keeps of a partition from one operation to the next. It belongs to the one
// operation of the name that is in flight.
type codedPart struct {
	key      uint64 // of the streams that it draws from
	elements int
}

func newCoding(c codec.Codec, t *wire.Tensor) *coding {
	k := &coding{codec: c, dtype: t.DType, parts: make([]codedPart, len(t.Parts))}
	for i, n := range t.Parts {
		k.parts[i] = codedPart{key: codec.KeyOf(t.ProcessSet, t.Name, uint32(i)), elements: int(n) / t.DType.Size()}
	}
	return k
}

// checkCodec reads what an operation names as its codec, once for each text. Callers hold mu.
func (e *Engine) checkCodec(op *Op) error {
	if op.Codec == "" || e.policies[op.Codec] != nil {
		return nil
	}
	p, err := e.cfg.LoadPolicy(op.Codec)
	if err != nil {
		return fmt.Errorf("%w: %q: %w", ErrInvalid, op.name(), err)
	}
	e.policies[op.Codec] = p
	return nil
}

// codecOf is how an operation's tensor travels, nil for plain: sums and differences of floating-point numbers
// are coded as the policy says, everything else is plain. A residual belongs to a name, so that a tensor
// without one is plain too where the codec would keep one. Callers hold mu.
func (e *Engine) codecOf(op *Op) codec.Codec {
	if !op.Kind.HasOp() || op.ReduceOp != units.Sum && op.ReduceOp != units.Average {
		return nil
	}
	p := e.cfg.Policy
	if op.Codec != "" {
		p = e.policies[op.Codec]
	}
	bytes, err := op.bytes()
	if err != nil {
		return nil // check has refused it
	}
	c := p.Choose(policy.Tensor{Name: op.name(), DType: op.DType, Bytes: bytes})
	if c == nil || op.Name == "" && codec.Answer(c).ResidualBytes(1)+c.ResidualBytes(1) > 0 {
		return nil
	}
	return c
}

// codecText is codecOf as it is declared.
func (e *Engine) codecText(op *Op) string {
	if c := e.codecOf(op); c != nil {
		return c.String()
	}
	return ""
}
