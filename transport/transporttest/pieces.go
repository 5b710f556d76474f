package transporttest

import (
	"net"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// SendPieces sends the input of a fuzzer: a series of pieces, each of one byte for the connection, two for the length,
// and its bytes. Pieces for a connection that has failed are dropped.
func SendPieces(conns []transport.Conn, input []byte) {
	for len(input) >= 3 {
		n := min(int(input[1])|int(input[2])<<8, len(input)-3)
		if n > 0 {
			_ = conns[int(input[0])%len(conns)].Send(net.Buffers{input[3 : 3+n]})
		}
		input = input[3+n:]
	}
}

// AppendPiece appends a piece to an input of SendPieces.
func AppendPiece(input []byte, conn int, piece []byte) []byte {
	return append(append(input, byte(conn), byte(len(piece)), byte(len(piece)>>8)), piece...)
}

// Batch is a batch of one frame, which is given with its payload.
func Batch(frame []byte) []byte {
	var h wire.Header
	if err := h.Decode(frame); err != nil {
		panic(err)
	}
	b := wire.AppendFrame(nil, wire.Header{Type: wire.TypeBatch}, frame[:wire.HeaderSize])
	if h.Length == 0 {
		return b
	}
	data := wire.Header{Type: wire.TypeData}
	data.Carry(&h)
	return wire.AppendFrame(b, data, frame[wire.HeaderSize:])
}

// Drain reads all frames of a connection, until it ends, and discards them.
func Drain(c transport.Conn) {
	var h wire.Header
	b := make([]byte, 4<<10)
	for c.ReadHeader(&h) == nil {
		for left := int(h.Length); left > 0; left -= min(left, len(b)) {
			if c.ReadPayload(b[:min(left, len(b))]) != nil {
				return
			}
		}
	}
}
