package server

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// coding is what a key or value of a coded tensor has besides. Sums of coded tensors are float32, whatever
// their type.
type coding struct {
	codec    codec.Codec // of pushes
	answers  codec.Codec // of what is sent back
	dtype    units.DType // of the tensor
	elements int
	stream   codec.Stream // of answers, but for the iteration
	before   uint64       // iterations that the tensor had before it was declared, as the rank says that knows of most
	residual *result      // of the answers of a key; nil before the first
}

// coding makes it for one partition; nil for a plain tensor.
func (t *tensor) coding(part uint32) *coding {
	if t.Pushes == nil {
		return nil
	}
	return &coding{
		codec: t.Pushes, answers: t.Answers, dtype: t.Type, elements: int(t.Parts[part]) / t.Type.Size(),
		stream: codec.Stream{Seed: t.r.s.cfg.Seed, Worker: codec.ServerSide, Key: codec.KeyOf(t.ProcessSet, t.Name, part)},
	}
}

// fits checks what a push says of its payload of n bytes, before memory is taken for it.
func (d *decided) fits(h *wire.Header, n int) error {
	t := d.t
	if h.DType == t.Type {
		switch {
		case h.Flags&wire.FlagEmpty != 0:
			if n == 0 && h.Flags&wire.FlagDeclare == 0 && h.Codec == wire.CodecPlain && (t.Reduce == units.Sum || t.Reduce == units.Average) {
				return nil
			}
		case d.coding == nil || t.Held() && h.Flags&wire.FlagDeclare != 0:
			if n == d.bytes && h.Codec == wire.CodecPlain {
				return nil
			}
		case h.Codec == wire.CodecDeclared && n <= d.coding.codec.MaxEncoded(d.coding.elements):
			return nil
		}
	}
	text := fmt.Sprintf("%d bytes of %v for partition %d of %q, want %d of %v", n, h.DType, h.Part, t.Name, d.bytes, t.Type)
	if d.coding != nil {
		text += fmt.Sprintf(", or a message of %s of up to %d; they come in encoding %d", t.Pushes, d.coding.codec.MaxEncoded(d.coding.elements), h.Codec)
	}
	return errors.New(text)
}

// had takes in a rank's word of how many iterations the tensor had before. Callers hold the key's mu.
func (c *coding) had(iterations uint32) {
	if c != nil {
		c.before = max(c.before, uint64(iterations))
	}
}

// at is the stream of a message: which one of an iteration it is makes those of the same iteration differ.
func (c *coding) at(iteration, message uint64) codec.Stream {
	s := c.stream
	s.Iteration = c.before + iteration
	s.Key += message
	return s
}

// encode makes a message of float32 elements; with a residual where the codec keeps one.
func (c *coding) encode(pool *mempool.Pool, by codec.Codec, src, residual []byte, s codec.Stream) ([]byte, error) {
	b, err := pool.Get(by.MaxEncoded(c.elements))
	if err != nil {
		return nil, err
	}
	return b[:by.Encode(b, src, residual, s)], nil
}

// decode turns an answer into the tensor of the worker in this process.
func (c *coding) decode(pool *mempool.Pool, by codec.Codec, out, message []byte) error {
	if c.dtype == units.Float32 {
		return by.Decode(out, message)
	}
	wide, err := pool.Get(4 * c.elements)
	if err != nil {
		return room.MemoryError{Err: err}
	}
	defer pool.Put(wide)
	if err := by.Decode(wide, message); err != nil {
		return err
	}
	reduce.Narrow(c.dtype, out, wide)
	return nil
}

// encoding is what headers of answers say.
func (d *decided) encoding() uint8 {
	if d.coding != nil {
		return wire.CodecDeclared
	}
	return wire.CodecPlain
}

// receive reads a rank's message and adds it.
func (k *key) receive(s *slot, h *wire.Header, p *room.Payload) error {
	if p.Len() <= room.ChunkBytes {
		b, err := p.Next(p.Len())
		if err == nil {
			k.take(s, h, b)
		}
		return err
	}
	b, ok, err := k.read(h, p)
	if ok {
		k.take(s, h, b)
		k.t.r.s.pool.Put(b)
	}
	return err
}

// receiveLocal is receive for the worker in this process, whose message is its own again afterwards.
func (k *key) receiveLocal(s *slot, h *wire.Header, message []byte) {
	if !k.t.Whole {
		k.take(s, h, message)
		return
	}
	b, err := k.t.r.s.pool.Get(len(message))
	if err != nil {
		k.t.OutOfMemory(h, room.MemoryError{Err: err})
		return
	}
	copy(b, message)
	k.contribute(s, h, b)
}

// take adds a rank's message. One that cannot be read fails the operation.
func (k *key) take(s *slot, h *wire.Header, message []byte) {
	var err error
	k.mu.Lock()
	if k.slots[h.Iteration] == s && !s.closed { // else it was given up, or closed without this rank
		err = k.addMessage(s, int(h.Rank), message)
	}
	k.mu.Unlock()
	if err != nil {
		k.t.r.fail(k.t, h.Seq, units.FailUnsupported, err.Error())
		k.t.r.drop(k.t, h.Iteration)
	}
}

// addMessage adds what a rank's message says, or nothing where it is malformed. Callers hold mu.
func (k *key) addMessage(s *slot, rank int, message []byte) (err error) {
	from := &s.chunks[0].from
	if from.Len() == 0 {
		err = k.coding.codec.Decode(s.acc, message)
	} else {
		err = k.coding.codec.DecodeAdd(s.acc, message)
	}
	if err != nil {
		return k.t.Malformed(k.part, rank, err)
	}
	from.Add(rank)
	return nil
}

// combineMessages is combine for messages that were kept.
func (k *key) combineMessages(s *slot, contributors rankset.Set) error {
	for _, rank := range k.t.Ranks {
		if message, ok := s.contrib[rank]; ok && contributors.Has(rank) {
			if err := k.addMessage(s, rank, message); err != nil {
				return err
			}
		}
	}
	k.dropContrib(s)
	return nil
}

// storeMessage is store for a coded tensor: the sum, scaled, becomes one message for all.
func (k *key) storeMessage(s *slot, iteration uint64) error {
	t, c, pool := k.t, k.coding, k.t.r.s.pool
	residual, err := k.ownResidual()
	if err != nil {
		return room.MemoryError{Err: err}
	}
	reduce.Store(units.Float32, s.acc, s.acc, t.Prescale*t.Postscale, t.divide(s.divisor))
	message, err := c.encode(pool, c.answers, s.acc, residual, c.at(iteration, 0))
	if err != nil {
		return room.MemoryError{Err: err}
	}
	pool.Put(s.acc)
	s.acc = nil
	s.result = newResult(t.r, message)
	return nil
}

// trim lets the residual go when no iteration can follow. Callers hold mu.
func (k *key) trim() {
	if c := k.coding; c != nil && c.residual != nil && len(k.slots) == 0 && k.t.Gone(room.GaveUp) {
		c.residual.Sent(nil)
		c.residual = nil
	}
}
