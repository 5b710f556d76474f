//go:build cgo

package fabric

import (
	"encoding/binary"
	"fmt"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// kind is the meaning of a message between two endpoints.
type kind uint8

const (
	kindData   kind = iota + 1 // the next bytes of the stream
	kindOffer                  // the next bytes of the stream lie in the sender's memory: the receiver reads them there
	kindWrite                  // so do bytes for memory that the receiver has granted
	kindReturn                 // how many messages were used up, and how many offers and writes were read; costs no credit. One of nothing is each end's first message
)

// A message is 24 bytes, little-endian: the receiver's key, the kind, and a number: for data how many bytes follow,
// for a return the messages and the offers in 32 bits each. Behind it an offer has address, key and length; a
// write these, its place, what follows it in the same call, and the token.
const (
	headSize  = 24
	offerSize = headSize + 24
	writeSize = offerSize + 16 + wire.TokenSize
)

// message is a message that has arrived.
type message struct {
	kind  kind
	slot  *slot
	index uint64 // among those that cost credit

	from, to int // of data: what was not used yet of the slot

	source // of an offer or a write

	at, left uint64 // of a write
	token    wire.Token

	messages, sources int // of a return
}

// source is memory of the peer that was not read yet.
type source struct{ address, key, length uint64 }

// keyOf is the key with which a message begins.
func keyOf(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

// parse reads a message of at least headSize bytes. It checks every number against what the receiver can do with it.
func parse(b []byte) (m message, err error) {
	word := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	m.kind = kind(b[8])
	number := word(16)
	size := headSize
	switch m.kind {
	case kindData:
		if number < 1 || number > slotBytes-headSize {
			return m, fmt.Errorf("a message with %d bytes", number)
		}
		m.from, m.to = headSize, headSize+int(number)
		size = m.to
	case kindOffer:
		size = offerSize
	case kindWrite:
		size = writeSize
	case kindReturn:
		m.messages, m.sources = int(uint32(number)), int(number>>32)
	default:
		return m, fmt.Errorf("a message of kind %d", m.kind)
	}
	if len(b) != size {
		return m, fmt.Errorf("a message of kind %d with %d bytes, not %d", m.kind, len(b), size)
	}
	if size >= offerSize && m.kind != kindData {
		m.source = source{word(headSize), word(headSize + 8), word(headSize + 16)}
		if m.length < 1 || m.length > limits.MaxTensor {
			return m, fmt.Errorf("an offer of %d bytes, limit %d", m.length, int64(limits.MaxTensor))
		}
	}
	if m.kind == kindWrite {
		m.at, m.left = word(offerSize), word(offerSize+8)
		err = m.token.Decode(b[offerSize+16:])
	}
	return m, err
}

// head writes the beginning of a message.
func head(b []byte, key uint64, k kind, number uint64) {
	binary.LittleEndian.PutUint64(b, key)
	binary.LittleEndian.PutUint64(b[8:], uint64(k))
	binary.LittleEndian.PutUint64(b[16:], number)
}

// putSource writes what follows the head of an offer or a write.
func putSource(b []byte, s source) {
	binary.LittleEndian.PutUint64(b[headSize:], s.address)
	binary.LittleEndian.PutUint64(b[headSize+8:], s.key)
	binary.LittleEndian.PutUint64(b[headSize+16:], s.length)
}

// putWrite writes what follows the source of a write.
func putWrite(b []byte, t wire.Token, at, left uint64) {
	binary.LittleEndian.PutUint64(b[offerSize:], at)
	binary.LittleEndian.PutUint64(b[offerSize+8:], left)
	t.Append(b[:offerSize+16])
}
