package transport

import (
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// BatchBytes is the memory that a batch needs.
const BatchBytes = limits.MaxBatched*wire.HeaderSize + limits.MaxBatch

// ReadBatch reads the batch whose header was read last from a connection, into memory of BatchBytes. The header becomes that of
// the batch's second frame, where there is one.
func ReadBatch(c Conn, h *wire.Header, b *wire.Batch, room []byte) error {
	headers, room := room[:h.Length], room[h.Length:]
	if err := c.ReadPayload(headers); err != nil {
		return err
	}
	if more, err := b.Open(headers); err != nil || !more {
		return err
	}
	if err := c.ReadHeader(h); err != nil {
		return err
	}
	if err := b.Check(h); err != nil {
		return err
	}
	b.Payloads = room[:h.Length]
	return c.ReadPayload(b.Payloads)
}
