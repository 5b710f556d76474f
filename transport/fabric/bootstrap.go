//go:build cgo

package fabric

import (
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// Behind the handshake each end says on the side connection where its endpoint is: the dialer first, which also says when it is
// ready. What it says has a fixed size and a tag by the keys of the handshake:
//
//	key       8 bytes, random: begins every message to the endpoint, so that those of others are known
//	protocol  4 bytes, libfabric's number
//	provider  1 byte of length, and the name
//	endpoint  2 bytes of length, and the name that the provider resolves
//	zeros     up to introSize
const (
	maxProvider = 64
	maxName     = 512
	introSize   = 8 + 4 + 1 + maxProvider + 2 + maxName
	ready       = 'R'
)

// intro is what one end says.
type intro struct {
	key      uint64
	protocol uint32
	provider string
	endpoint []byte
}

func (i *intro) append(b []byte) []byte {
	whole := len(b) + introSize
	b = binary.LittleEndian.AppendUint64(b, i.key)
	b = binary.LittleEndian.AppendUint32(b, i.protocol)
	b = append(append(b, byte(len(i.provider))), i.provider...)
	b = append(binary.LittleEndian.AppendUint16(b, uint16(len(i.endpoint))), i.endpoint...)
	return append(b, make([]byte, whole-len(b))...)
}

// decode reads what append has written. Its tag was right, so only another release could have written something else.
func (i *intro) decode(b []byte) error {
	i.key, i.protocol = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])
	b = b[12:]
	n := int(b[0])
	if n > maxProvider {
		return fmt.Errorf("the name of a provider has %d bytes, limit %d", n, maxProvider)
	}
	i.provider, b = string(b[1:1+n]), b[1+n:]
	n = int(binary.LittleEndian.Uint16(b))
	if n > maxName {
		return fmt.Errorf("the name of an endpoint has %d bytes, limit %d", n, maxName)
	}
	i.endpoint = b[2 : 2+n]
	return nil
}

// carry makes a stream over the fabric beside an authenticated side connection (stream.Config.Carrier).
func (n *network) carry(side net.Conn, s *auth.Session, accepted bool) (net.Conn, error) {
	d, err := n.device()
	if err != nil {
		return nil, err
	}
	c := newConn(side, d, n.patience)
	c.all = s.All
	if err := d.join(c); err != nil {
		return nil, err
	}
	if err := c.introduce(s, accepted); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.leave()
		return nil, err
	}
	go c.watch()
	return c, nil
}

// introduce exchanges the endpoints' names.
func (c *conn) introduce(s *auth.Session, accepted bool) error {
	name, err := c.device.name()
	if err != nil {
		return err
	}
	mine, theirs := intro{c.key, c.device.protocol, c.device.provider, name}, intro{}
	said := mine.append(nil)
	said = s.Out.Append(said, math.MaxUint64, 0, said) // no frame has this number
	put := func(b []byte) error { _, err := c.Conn.Write(b); return c.interrupted(err) }
	say := func() error { return put(said) }
	hear := func() error { return c.hear(s, &theirs) }
	agree := func() error { return c.agree(&theirs) }
	steps := []func() error{say, hear, agree, func() error { return put([]byte{ready}) }}
	if accepted { // a dialer that is of another fabric hears it, too
		steps = []func() error{hear, say, agree, func() error { _, err := io.ReadFull(c.Conn, make([]byte, 1)); return c.interrupted(err) }}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// interrupted is the error of a side connection that has ended too early: the peer's patience may have, and another attempt may succeed.
func (c *conn) interrupted(err error) error {
	if err == nil {
		return nil
	}
	return auth.Interrupted(c.RemoteAddr().String(), err)
}

// hear reads what the peer says.
func (c *conn) hear(s *auth.Session, theirs *intro) error {
	var said [introSize + wire.TagSize]byte
	if _, err := io.ReadFull(c.Conn, said[:]); err != nil {
		return c.interrupted(err)
	}
	if !s.In.Fit(said[introSize:], math.MaxUint64, 0, said[:introSize]) {
		return fmt.Errorf("%w: the address of the endpoint of %v does not have its authentication tag", transport.ErrIntegrity, c.RemoteAddr())
	}
	return theirs.decode(said[:])
}

// agree sets the peer, if it is of the same fabric.
func (c *conn) agree(theirs *intro) error {
	if theirs.provider != c.device.provider || theirs.protocol != c.device.protocol {
		return fmt.Errorf("the fabric there is %s (protocol %d), and %s (%d) here: set PACELINE_FABRIC to one of them on every node",
			theirs.provider, theirs.protocol, c.device.provider, c.device.protocol)
	}
	peer, err := c.device.peer(theirs.endpoint)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.peer, c.theirs = peer, theirs.key
	return err
}
