package wire

import (
	"encoding/binary"
	"fmt"
)

// Rows is the payload of what an elastic job gathers: what each rank gives, one behind the other, behind their lengths.
type Rows [][]byte

const rowsLength = 4 // of the length of a rank's

// RowsSize is the length of the encoding of the rows of so many ranks, with so many bytes together.
func RowsSize(ranks int, bytes int64) int64 { return int64(ranks)*rowsLength + bytes }

// Append appends the encoded payload to b.
func (r Rows) Append(b []byte) []byte {
	for _, of := range r {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(of)))
	}
	for _, of := range r {
		b = append(b, of...)
	}
	return b
}

// Decode reads the payload, of as many ranks as r has. The rows lie in b.
func (r Rows) Decode(b []byte) error {
	if len(b) < len(r)*rowsLength {
		return fmt.Errorf("bad rows: %d bytes for %d ranks", len(b), len(r))
	}
	lengths, rest := b[:len(r)*rowsLength], b[len(r)*rowsLength:]
	for i := range r {
		n := binary.LittleEndian.Uint32(lengths[i*rowsLength:])
		if uint64(n) > uint64(len(rest)) {
			return fmt.Errorf("bad rows: those of rank %d of %d have %d bytes, where %d are left", i, len(r), n, len(rest))
		}
		r[i], rest = rest[:n:n], rest[n:]
	}
	if len(rest) > 0 {
		return fmt.Errorf("bad rows: %d bytes behind those of %d ranks", len(rest), len(r))
	}
	return nil
}
