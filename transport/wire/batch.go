package wire

import (
	"errors"
	"fmt"
	"slices"

	"github.com/paceline/paceline/internal/limits"
)

// A batch is two frames. The payload of the first, of TypeBatch, is the headers of small frames, none of them a batch's. Their
// payloads, one after the other, are that of the second, of TypeData, which is missing where they are all empty. Tensors in
// batches thus have authentication tags only where those alone do.

// ErrBatch is wrapped by every error about the format of a batch.
var ErrBatch = errors.New("bad batch")

// Batch is a batch that is received. Its memory serves the next one too.
type Batch struct {
	Payloads []byte // the payload of the second frame

	frames []Header
	data   Header // of the second frame, without flags that it need not have
}

// Open decodes and checks the headers of a batch's frames. It reports whether a second frame follows.
func (b *Batch) Open(headers []byte) (more bool, err error) {
	b.frames, b.data, b.Payloads = slices.Grow(b.frames[:0], len(headers)/HeaderSize), Header{Type: TypeData}, nil
	for at := 1; len(headers) > 0; at++ {
		var h Header
		if err := h.Decode(headers); err != nil {
			return false, fmt.Errorf("%w: frame %d: %w", ErrBatch, at, err)
		}
		if h.Type == TypeBatch || h.Type == TypeData {
			return false, fmt.Errorf("%w: frame %d is a batch itself", ErrBatch, at)
		}
		if b.data.Carry(&h); b.data.Length > limits.MaxBatch {
			return false, fmt.Errorf("%w: %d bytes up to frame %d, a %v, limit %d", ErrBatch, b.data.Length, at, h.Type, limits.MaxBatch)
		}
		b.frames, headers = append(b.frames, h), headers[HeaderSize:]
	}
	return b.data.Length > 0, nil
}

// Carry has the second frame of a batch carry the payload of one more frame.
func (h *Header) Carry(frame *Header) {
	h.Length += frame.Length
	if frame.Length > 0 && (!frame.Type.CarriesTensor() || frame.Flags&FlagAuthenticated != 0) {
		h.Flags = FlagAuthenticated
	}
}

// Check checks the header of the second frame.
func (b *Batch) Check(data *Header) error {
	switch {
	case data.Type != TypeData || data.Length != b.data.Length:
		return fmt.Errorf("%w: a %v of %d bytes follows, want the %d bytes of its frames", ErrBatch, data.Type, data.Length, b.data.Length)
	case b.data.Flags&^data.Flags != 0:
		return fmt.Errorf("%w: frames whose payloads have authentication tags are in a batch without", ErrBatch)
	}
	return nil
}

// Frames calls f with each frame of a batch, in order, and returns f's first error. Header and payload are parts of the batch.
func (b *Batch) Frames(f func(h *Header, payload []byte) error) error {
	rest := b.Payloads
	for i := range b.frames {
		h := &b.frames[i]
		payload := rest[:h.Length:h.Length]
		rest = rest[h.Length:]
		if err := f(h, payload); err != nil {
			return err
		}
	}
	return nil
}
