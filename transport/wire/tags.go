package wire

import (
	"encoding/binary"

	"github.com/paceline/paceline/internal/limits"
)

// On a stream that nothing below protects (TLS does), authentication tags stand between the bytes of the frames:
//
//	header   HeaderSize bytes
//	tag      TagSize bytes, over the header
//	payload  in chunks of ChunkBytes, the last one shorter; where Tagged says so, a tag over each chunk behind it
//
// The headers of the frames in a batch are its payload and have no tags of their own. Package auth makes and checks tags.
const (
	TagSize    = 16
	ChunkBytes = 256 << 10 // a receiver uses no byte of a chunk before it has checked the chunk's tag
)

const _ = uint(ChunkBytes - limits.MaxBatch) // the payloads of a batch have one tag at most

// Tagged reads from an encoded header, which may be any bytes, how long its payload is and whether that has tags: all
// payloads but those of tensors do, and with FlagAuthenticated or all these, too.
func Tagged(header []byte, all bool) (length uint32, tagged bool) {
	t, flags := Type(header[3]), Flags(binary.LittleEndian.Uint16(header[4:]))
	return binary.LittleEndian.Uint32(header[20:]), all || flags&FlagAuthenticated != 0 || !t.CarriesTensor()
}

// CarriesTensor reports whether the payload of a frame of the type is a part of a tensor, or of several.
func (t Type) CarriesTensor() bool {
	return t == TypePush || t == TypePut || t == TypeResult || t == TypeRestore || t == TypeSupply || t == TypeResidual || t == TypeData || t == TypeSend || t == TypePiece
}
