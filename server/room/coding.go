package room

import (
	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
)

// Coding is what a partition of a coded tensor has besides. Sums of coded tensors are float32, whatever their type.
type Coding struct {
	Elements int
	dtype    units.DType
	stream   codec.Stream // of answers, but for the iteration
	pool     *mempool.Pool
}

func newCoding(t *Tensor, part uint32) *Coding {
	if t.Pushes == nil {
		return nil
	}
	return &Coding{
		Elements: int(t.Parts[part]) / t.Type.Size(), dtype: t.Type, pool: t.Round.Pool,
		stream: codec.Stream{Seed: t.Round.Seed, Worker: codec.ServerSide, Key: codec.KeyOf(t.ProcessSet, t.Name, part)},
	}
}

// At is the stream of a message: which one of an iteration it is makes those of the same iteration differ.
func (c *Coding) At(iteration, message uint64) codec.Stream {
	s := c.stream
	s.Iteration = iteration
	s.Key += message
	return s
}

// Encode makes a message of float32 elements, in lent memory; with a residual where the codec keeps one.
func (c *Coding) Encode(by codec.Codec, src, residual []byte, s codec.Stream) ([]byte, error) {
	b, err := c.pool.Get(by.MaxEncoded(c.Elements))
	if err != nil {
		return nil, MemoryError{err}
	}
	return b[:by.Encode(b, src, residual, s)], nil
}

// Decode turns an answer into the tensor of the worker in this process.
func (c *Coding) Decode(by codec.Codec, out, message []byte) error {
	if c.dtype == units.Float32 {
		return by.Decode(out, message)
	}
	wide, err := c.pool.Get(4 * c.Elements)
	if err != nil {
		return MemoryError{err}
	}
	defer c.pool.Put(wide)
	if err := by.Decode(wide, message); err != nil {
		return err
	}
	reduce.Narrow(c.dtype, out, wide)
	return nil
}
