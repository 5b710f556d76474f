package transport

import (
	"fmt"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// BatchBytes is the memory that a batch needs.
const BatchBytes = limits.MaxBatched*wire.HeaderSize + limits.MaxBatch

// ReadBatch reads the batch whose header was read last from a connection, into memory of BatchBytes; nil for its own. The header
// becomes that of the batch's second frame, where there is one.
func ReadBatch(c Conn, h *wire.Header, room []byte) (b wire.Batch, err error) {
	if room == nil {
		room = make([]byte, BatchBytes)
	}
	b.Headers = room[:h.Length]
	if len(b.Headers) == 0 {
		return b, nil
	}
	if err := c.ReadPayload(b.Headers); err != nil {
		return b, err
	}
	want, err := wire.DataHeader(b.Headers)
	if err != nil || want.Length == 0 {
		return b, err
	}
	if err := c.ReadHeader(h); err != nil {
		return b, err
	}
	if h.Type != wire.TypeData || h.Length != want.Length {
		return b, fmt.Errorf("%w: a %v of %d bytes follows, want the %d bytes of its frames", wire.ErrBatch, h.Type, h.Length, want.Length)
	}
	b.Flags, b.Data = h.Flags, room[len(b.Headers):][:h.Length]
	return b, c.ReadPayload(b.Data)
}
