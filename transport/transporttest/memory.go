package transporttest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
	"github.com/paceline/paceline/transport/wire"
)

// region is registered memory (transport.Region).
type region struct {
	network  *Network
	number   uint64
	memory   []byte
	released bool // behind the network's lock
}

// Register implements transport.Registrar.
func (n *node) Register(memory []byte) (transport.Region, error) {
	if len(memory) == 0 {
		return nil, errors.New("registering memory of no bytes")
	}
	n.network.mu.Lock()
	defer n.network.mu.Unlock()
	n.network.traffic.regions++
	return &region{network: n.network, number: n.network.traffic.regions, memory: memory}, nil
}

func (r *region) Memory() []byte { return r.memory }

func (r *region) Release() {
	r.network.mu.Lock()
	defer r.network.mu.Unlock()
	r.released = true
}

// grant is what the peer of a connection may write into.
type grant struct {
	region *region
	token  wire.Token
}

// write is the rest of a one-sided write, or one piece of it.
type write struct {
	token wire.Token
	at    int // where the next byte belongs, from the beginning of the token's part
	left  int // bytes that follow those in flight
}

// next is the piece of the next n bytes of a write; nil for the stream.
func (w *write) next(n int) *write {
	if w == nil {
		return nil
	}
	piece := &write{w.token, w.at, w.left - n}
	w.at, w.left = w.at+n, w.left-n
	return piece
}

// grant grants a part of a region to the peer.
func (e *end) grant(r *region, offset, length int) (wire.Token, error) {
	switch {
	case r.released:
		return wire.Token{}, errors.New("granting a region that was released")
	case offset < 0 || length < 1 || length > len(r.memory)-offset:
		return wire.Token{}, fmt.Errorf("granting %d bytes from %d on of a region of %d", length, offset, len(r.memory))
	case e.closed:
		return wire.Token{}, net.ErrClosed
	}
	t := wire.Token{Region: r.number, Key: rand.Uint64(), Offset: uint64(offset), Length: uint64(length)}
	if e.grants == nil {
		e.grants = map[uint64]grant{}
	}
	e.grants[t.Key] = grant{r, t}
	return t, nil
}

// place copies a piece of the peer's write into the memory, if that is granted.
func (e *end) place(piece *chunk) error {
	w := piece.write
	g, ok := e.grants[w.token.Key]
	refused := ""
	switch {
	case !ok || g.token != w.token:
		refused = "its token was not given on this connection, or was revoked"
	case g.region.released:
		refused = "the region was released"
	case w.at < 0 || w.at > int(g.token.Length)-len(piece.data)-w.left: // the whole write, so that a refused one changes nothing
		refused = fmt.Sprintf("%d bytes from %d on are not within the %d that were granted", len(piece.data)+w.left, w.at, g.token.Length)
	}
	if refused != "" {
		return fmt.Errorf("%w: region %d: %s", transport.ErrAccess, w.token.Region, refused)
	}
	copy(g.region.memory[int(g.token.Offset)+w.at:], piece.data)
	e.in.torn = w.left > 0
	return nil
}

// connOfWrites is a connection with one-sided writes (transport.OneSided).
type connOfWrites struct {
	*stream.Conn
	raw *conn
}

func withWrites(c *stream.Conn) transport.Conn { return &connOfWrites{c, c.NetConn().(*conn)} }

// Grant implements transport.OneSided.
func (c *connOfWrites) Grant(r transport.Region, offset, length int) (wire.Token, error) {
	mine, ok := r.(*region)
	if !ok || mine.network != c.raw.network {
		return wire.Token{}, errors.New("granting a region of another transport")
	}
	c.raw.network.mu.Lock()
	defer c.raw.network.mu.Unlock()
	return c.raw.end.grant(mine, offset, length)
}

// Revoke implements transport.OneSided.
func (c *connOfWrites) Revoke(t wire.Token) {
	c.raw.network.mu.Lock()
	defer c.raw.network.mu.Unlock()
	delete(c.raw.end.grants, t.Key)
}

// WriteTo sends the bytes in order with the stream. They are copied into the memory when they have arrived and the peer
// reads.
func (c *connOfWrites) WriteTo(t wire.Token, at int, buffers net.Buffers) error {
	w := &write{token: t, at: at}
	for _, b := range buffers {
		w.left += len(b)
	}
	return c.Aside(func() error {
		for _, b := range buffers {
			if _, err := c.raw.send(b, w); err != nil {
				return err
			}
		}
		return nil
	})
}
