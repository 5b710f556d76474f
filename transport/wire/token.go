package wire

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
)

// Token names a part of one node's registered memory into which the peer of one connection may write. It travels in
// the payload of a frame, from the owner of the memory to the writer, and has no meaning to others.
type Token struct {
	Region uint64 // the owner's number of the registered memory
	Key    uint64 // random: of this grant on this connection
	Offset uint64 // of the part within the region, in bytes
	Length uint64 // of the part, in bytes
}

// TokenSize is the length of an encoded token in bytes.
const TokenSize = 32

// ErrToken is wrapped by every error that decoding a token returns.
var ErrToken = errors.New("bad token")

// Append appends the encoded token to b.
func (t *Token) Append(b []byte) []byte { return appendWords(b, t.Region, t.Key, t.Offset, t.Length) }

// Decode reads a token from the first TokenSize bytes of b and checks its bounds.
func (t *Token) Decode(b []byte) error {
	if len(b) < TokenSize {
		return fmt.Errorf("%w: %d bytes, need %d", ErrToken, len(b), TokenSize)
	}
	readWords(b, &t.Region, &t.Key, &t.Offset, &t.Length)
	if t.Offset > limits.MaxTensor || t.Length > limits.MaxTensor {
		return fmt.Errorf("%w: %d bytes from %d on, limit %d", ErrToken, t.Length, t.Offset, int64(limits.MaxTensor))
	}
	return nil
}
