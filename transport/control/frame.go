package control

import (
	"fmt"
	"net"
	"time"

	"github.com/valyala/bytebufferpool"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// maxHello bounds the JSON of a hello in bytes; a well-formed one has about fifty.
const maxHello = 4 << 10

// Send encodes v and sends it alone.
func Send(c transport.Conn, t wire.Type, v any) error {
	b := bytebufferpool.Get()
	defer bytebufferpool.Put(b)
	if err := wire.AppendJSON(b, wire.Header{Type: t}, v); err != nil {
		return err
	}
	return c.Send(net.Buffers{b.B})
}

// helloTime is how long a peer that has authenticated may take to say who it is: more than either may be stopped.
const helloTime = 30 * time.Second

// ReadHello reads the first frame of a connection, and closes one on which it does not come.
func ReadHello(c transport.Conn) (hello wire.Hello, err error) {
	late := time.AfterFunc(helloTime, func() { _ = c.Close() })
	err = read(c, wire.TypeHello, maxHello, &hello)
	if !late.Stop() && err != nil {
		err = fmt.Errorf("no hello within %v: %w", helloTime, err)
	}
	return hello, err
}

// Read reads the next control message.
func Read(c transport.Conn, m *wire.Control) error {
	*m = wire.Control{}
	return read(c, wire.TypeControl, limits.MaxControl, m)
}

// read reads a frame that has to be of type t, with a JSON payload of at most limit bytes, into v.
func read(c transport.Conn, t wire.Type, limit uint32, v any) error {
	var h wire.Header
	if err := c.ReadHeader(&h); err != nil {
		return err
	}
	if h.Type != t {
		return fmt.Errorf("a %v frame came where a %v frame belongs", h.Type, t)
	}
	if h.Length > limit {
		return fmt.Errorf("%v of %d bytes, limit %d", t, h.Length, limit)
	}
	payload := make([]byte, h.Length)
	if err := c.ReadPayload(payload); err != nil {
		return err
	}
	return wire.DecodeJSON(t, payload, v)
}
