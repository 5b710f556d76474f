package wire

import (
	"encoding/json"
	"fmt"

	"github.com/valyala/bytebufferpool"

	"github.com/paceline/paceline/internal/limits"
)

// AppendFrame appends a whole frame: h, with Length set to that of the payload, and the payload.
func AppendFrame(b []byte, h Header, payload []byte) []byte {
	h.Length = uint32(len(payload))
	return append(h.Append(b), payload...)
}

// AppendJSON appends a whole frame with v as its payload to b. An error leaves b unchanged: the payload is longer than
// limits.MaxControl, or frames of that type carry no JSON.
func AppendJSON(b *bytebufferpool.ByteBuffer, h Header, v any) error {
	from := len(b.B)
	b.B = h.Append(b.B) // written again when the length is known
	if err := json.NewEncoder(b).Encode(v); err != nil {
		b.B = b.B[:from]
		return fmt.Errorf("%v frame: %w", h.Type, err)
	}
	b.B = b.B[:len(b.B)-1] // the encoder ends with a newline
	n := len(b.B) - from - HeaderSize
	if limit := min(h.Type.maxPayload(), limits.MaxControl); n > int(limit) {
		b.B = b.B[:from]
		return fmt.Errorf("%v payload of %d bytes, limit %d", h.Type, n, limit)
	}
	h.Length = uint32(n)
	h.Append(b.B[:from])
	return nil
}
