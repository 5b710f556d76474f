package wire

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
)

// A batch is two frames. The payload of the first, of TypeBatch, is the headers of small frames, none of them a batch's. Their
// payloads, one after the other, are that of the second, of TypeData, which is missing where they are all empty. Tensors in
// batches thus have authentication tags only where those alone do.

// ErrBatch is wrapped by every error about the format of a batch.
var ErrBatch = errors.New("bad batch")

// Batch is a batch that was received.
type Batch struct {
	Headers []byte // the payload of the first frame
	Data    []byte // that of the second one
	Flags   Flags  // of the second one

	one Header // what Frames hands out
}

// DataHeader checks a batch's headers and makes that of its second frame, whose length is 0 where there is none.
func DataHeader(headers []byte) (data Header, err error) {
	data.Type = TypeData
	length, at := 0, 0
	for ; len(headers) > 0; at++ {
		var h Header
		if err := h.Decode(headers); err != nil {
			return data, fmt.Errorf("%w: frame %d: %w", ErrBatch, at+1, err)
		}
		headers = headers[HeaderSize:]
		if h.Type == TypeBatch || h.Type == TypeData {
			return data, fmt.Errorf("%w: frame %d is a batch itself", ErrBatch, at+1)
		}
		if h.Length > 0 && (!h.Type.CarriesTensor() || h.Flags&FlagAuthenticated != 0) {
			data.Flags = FlagAuthenticated
		}
		if length += int(h.Length); length > limits.MaxBatch {
			return data, fmt.Errorf("%w: %d bytes up to frame %d, a %v, limit %d", ErrBatch, length, at+1, h.Type, limits.MaxBatch)
		}
	}
	data.Length = uint32(length)
	return data, nil
}

// Frames calls f with each frame of a batch, in order, and returns f's first error. The header, the batch's own, is valid until f
// returns; the payload is a part of the batch's.
func (b *Batch) Frames(f func(h *Header, payload []byte) error) error {
	want, err := DataHeader(b.Headers)
	switch {
	case err != nil:
		return err
	case int(want.Length) != len(b.Data):
		return fmt.Errorf("%w: %d bytes for frames of %d", ErrBatch, len(b.Data), want.Length)
	case want.Flags&^b.Flags != 0:
		return fmt.Errorf("%w: frames whose payloads have authentication tags are in a batch without", ErrBatch)
	}
	h, data := &b.one, b.Data
	for headers := b.Headers; len(headers) > 0; headers = headers[HeaderSize:] {
		if err := h.Decode(headers); err != nil {
			return err // DataHeader has found it good
		}
		end := int(h.Length)
		if err := f(h, data[:end:end]); err != nil {
			return err
		}
		data = data[end:]
	}
	return nil
}

// AppendBatch appends a batch of whole frames, each encoded as AppendFrame does.
func AppendBatch(b []byte, frames ...[]byte) []byte {
	var headers, payloads []byte
	for _, f := range frames {
		headers, payloads = append(headers, f[:HeaderSize]...), append(payloads, f[HeaderSize:]...)
	}
	b = AppendFrame(b, Header{Type: TypeBatch}, headers)
	data, _ := DataHeader(headers)
	if len(payloads) > 0 {
		b = AppendFrame(b, data, payloads)
	}
	return b
}
