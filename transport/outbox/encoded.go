package outbox

import (
	"github.com/valyala/bytebufferpool"

	"github.com/paceline/paceline/transport/wire"
)

// pooled is a frame's payload in a buffer that returns to its pool when the frame was sent or has failed.
type pooled bytebufferpool.ByteBuffer

// Sent implements Owner.
func (p *pooled) Sent(error) { bytebufferpool.Put((*bytebufferpool.ByteBuffer)(p)) }

// Encoded is a frame with a payload of a fixed size.
func Encoded[P interface{ Append(b []byte) []byte }](h wire.Header, payload P) Frame {
	b := bytebufferpool.Get()
	b.B = payload.Append(b.B)
	return Frame{Header: h, Payload: b.B, Owner: (*pooled)(b)}
}

// JSON is a frame with v as its payload. Errors are those of wire.AppendJSON.
func JSON(h wire.Header, v any) (Frame, error) {
	b := bytebufferpool.Get()
	if err := wire.AppendJSON(b, h, v); err != nil {
		bytebufferpool.Put(b)
		return Frame{}, err
	}
	return Frame{Header: h, Payload: b.B[wire.HeaderSize:], Owner: (*pooled)(b)}, nil
}
