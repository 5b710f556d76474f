package wire

import (
	"encoding/json"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
)

// AppendFrame appends a whole frame: h, with Length set to that of the payload, and the payload.
func AppendFrame(b []byte, h Header, payload []byte) []byte {
	h.Length = uint32(len(payload))
	return append(h.Append(b), payload...)
}

// JSONFrame makes a whole frame with v as its payload. The error is of a payload that no peer would
// take, because it is longer than limits.MaxControl or because frames of that type carry no such thing.
func JSONFrame(h Header, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("%v frame: %w", h.Type, err)
	}
	if limit := min(h.Type.maxPayload(), limits.MaxControl); len(payload) > int(limit) {
		return nil, fmt.Errorf("%v payload of %d bytes, limit %d", h.Type, len(payload), limit)
	}
	return AppendFrame(make([]byte, 0, HeaderSize+len(payload)), h, payload), nil
}
