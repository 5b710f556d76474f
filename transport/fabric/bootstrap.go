//go:build cgo

package fabric

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/auth"
	"github.com/paceline/paceline/transport/wire"
)

// Behind the handshake each end says on the side connection where its endpoint is, the dialer first. Then a message crosses the fabric in each direction,
// again the dialer's first. When the dialer has the other it says so on the side connection. What an end says of its endpoint has a fixed size and a tag by
// the keys of the handshake:
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
	err = c.introduce(s, accepted)
	if err == nil {
		go c.watch() // by whose end meet ends too, at the latest at the deadline of the handshake
		err = c.meet(accepted)
	}
	if err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.leave()
		return nil, err
	}
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
	say := func() error { _, err := c.Conn.Write(said); return c.interrupted(err) }
	hear := func() error { return c.hear(s, &theirs) }
	agree := func() error { return c.agree(&theirs) }
	if accepted { // a dialer that is of another fabric hears it, too
		return inTurn(hear, say, agree)
	}
	return inTurn(say, hear, agree)
}

// meet has a message cross the fabric in each direction: that the endpoints' names are known does not say that one leads to the other.
func (c *conn) meet(accepted bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	met := func() error { return c.await(&c.met) }
	if accepted {
		return inTurn(met, c.greet, func() error { return c.await(&c.ready) })
	}
	return inTurn(c.greet, met, c.sayReady)
}

// greet sends the peer's endpoint a return of nothing.
func (c *conn) greet() error {
	for {
		if err := c.sendReturn(); !errors.Is(err, errAgain) {
			return err
		}
		if err := c.writeEnd(); err != nil {
			return err
		}
		c.writable.Wait()
	}
}

// await waits for what the peer does.
func (c *conn) await(done *bool) error {
	for !*done {
		if err := c.writeEnd(); err != nil {
			return err
		}
		c.writable.Wait()
	}
	return nil
}

// sayReady tells the listening side that both ends have a message.
func (c *conn) sayReady() error {
	c.ready = true
	_, err := c.Conn.Write([]byte{sideReady})
	return c.interrupted(err)
}

// inTurn takes steps until one fails.
func inTurn(steps ...func() error) error {
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
