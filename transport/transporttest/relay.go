package transporttest

import (
	"io"
	"net"
	"slices"
	"sync"

	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// Tamper changes one direction of a connection on its way. It gets what came behind the handshake, frame by frame as they
// stand on the stream, with their tags, and returns what goes on instead. Beats, which come at any time, go on as they are.
type Tamper func(frame []byte) []byte

// Relay accepts connections and passes each on over one that dial makes, handshakes unchanged, until the listener is
// closed. Tampers are called for each connection: toListener for what goes to the end that dial reaches, toDialer for what
// comes from there; nil changes nothing. all says whether the payloads of tensors have tags.
func Relay(l net.Listener, dial func() (net.Conn, error), all bool, toListener, toDialer func() Tamper) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer near.Close()
			far, err := dial()
			if err != nil {
				return
			}
			defer far.Close()
			var directions sync.WaitGroup
			directions.Go(func() { pass(far, near, auth.ClientBytes, all, toListener); far.Close(); near.Close() })
			directions.Go(func() { pass(near, far, auth.ServerBytes, all, toDialer); far.Close(); near.Close() })
			directions.Wait()
		})
	}
}

// pass copies one direction.
func pass(to io.Writer, from io.Reader, handshake int, all bool, tampers func() Tamper) {
	if _, err := io.CopyN(to, from, int64(handshake)); err != nil {
		return
	}
	if tampers == nil {
		_, _ = io.Copy(to, from)
		return
	}
	tamper := tampers()
	for {
		frame, err := readTagged(from, all)
		if err != nil {
			return
		}
		var h wire.Header
		if err := h.Decode(frame); err != nil || h.Type != wire.TypeBeat {
			frame = tamper(frame)
		}
		if _, err := to.Write(frame); err != nil {
			return
		}
	}
}

// readTagged reads a whole frame with its tags.
func readTagged(from io.Reader, all bool) ([]byte, error) {
	header := make([]byte, wire.HeaderSize+wire.TagSize)
	if _, err := io.ReadFull(from, header); err != nil {
		return nil, err
	}
	length, tagged := wire.Tagged(header, all)
	size := int(length)
	if tagged {
		size += wire.TagSize * ((size + wire.ChunkBytes - 1) / wire.ChunkBytes)
	}
	payload := make([]byte, size)
	_, err := io.ReadFull(from, payload)
	return slices.Concat(header, payload), err
}
