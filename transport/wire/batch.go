package wire

import (
	"errors"
	"fmt"
)

// The payload of a batch frame is a sequence of whole frames, none of them a batch.

// ErrBatch is wrapped by every error about the format of a batch.
var ErrBatch = errors.New("bad batch frame")

// Frames calls f with each frame in the payload of a batch, in order, and returns f's first error. The header is valid
// until f returns; the payload is a part of the batch's.
func Frames(payload []byte, f func(h *Header, payload []byte) error) error {
	var h Header
	for i := 1; len(payload) > 0; i++ {
		if err := h.Decode(payload); err != nil {
			return fmt.Errorf("%w: frame %d: %w", ErrBatch, i, err)
		}
		payload = payload[HeaderSize:]
		switch {
		case h.Type == TypeBatch:
			return fmt.Errorf("%w: frame %d is a batch itself", ErrBatch, i)
		case int64(h.Length) > int64(len(payload)):
			return fmt.Errorf("%w: frame %d, a %v of %d bytes, is longer than the rest of the batch", ErrBatch, i, h.Type, h.Length)
		}
		end := int(h.Length)
		if err := f(&h, payload[:end:end]); err != nil {
			return err
		}
		payload = payload[end:]
	}
	return nil
}
