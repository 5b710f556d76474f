package wire

import (
	"errors"
	"fmt"
)

// The payload of a batch frame is Count whole frames one behind the other, none of them a batch.

// ErrBatch is wrapped by every error about the make-up of a batch.
var ErrBatch = errors.New("bad batch frame")

// Frames calls f with each of the count frames in the payload of a batch, in order, up to f's first
// error, which it returns. f may use the header until it returns; the payload is a part of the batch's.
func Frames(payload []byte, count uint32, f func(h *Header, payload []byte) error) error {
	var h Header
	for i := range count {
		if err := h.Decode(payload); err != nil {
			return fmt.Errorf("%w: frame %d of %d: %w", ErrBatch, i+1, count, err)
		}
		payload = payload[HeaderSize:]
		switch {
		case h.Type == TypeBatch:
			return fmt.Errorf("%w: frame %d of %d is a batch itself", ErrBatch, i+1, count)
		case int64(h.Length) > int64(len(payload)):
			return fmt.Errorf("%w: frame %d of %d, a %v of %d bytes, ends behind the batch", ErrBatch, i+1, count, h.Type, h.Length)
		}
		end := int(h.Length)
		if err := f(&h, payload[:end:end]); err != nil {
			return err
		}
		payload = payload[end:]
	}
	if len(payload) > 0 {
		return fmt.Errorf("%w: %d bytes behind the last of %d frames", ErrBatch, len(payload), count)
	}
	return nil
}
