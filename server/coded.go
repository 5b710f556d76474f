package server

import (
	"fmt"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

// setCodec takes in how a tensor is coded.
func (t *tensor) setCodec() error {
	c, err := codec.Parse(t.Codec)
	if err != nil {
		return err
	}
	if !t.Kind.HasOp() || !t.DType.Float() || t.Op != units.Sum && t.Op != units.Average {
		return fmt.Errorf("codec %s for a %v by %v of %v: only sums of floating-point tensors are coded", c, t.Kind, t.Op, t.DType)
	}
	for i, n := range t.Parts {
		if most := c.MaxEncoded(int(n) / t.DType.Size()); most > limits.MaxPayload {
			return fmt.Errorf("codec %s: a message of partition %d may have %d bytes, limit %d: make partitions smaller", c, i, most, limits.MaxPayload)
		}
	}
	t.codec, t.answers = c, codec.Answer(c)
	return nil
}
