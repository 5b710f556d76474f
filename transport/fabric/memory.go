//go:build cgo

package fabric

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/unique"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/stream"
	"github.com/paceline/paceline/transport/wire"
)

// region is registered memory (transport.Region).
type region struct {
	device *device
	number uint64
	memory []byte
	x      exposed
	pins   runtime.Pinner

	mu       lockorder.Mutex
	idle     *sync.Cond
	busy     int // reads into it that are under way
	released bool
}

// Register implements transport.Registrar.
func (n *network) Register(memory []byte) (transport.Region, error) {
	if len(memory) == 0 {
		return nil, errors.New("registering memory of no bytes")
	}
	d, err := n.device()
	if err != nil {
		return nil, err
	}
	r := &region{device: d, memory: memory, number: unique.Number()}
	r.mu.Place(levelRegion, "fabric.region.mu")
	r.idle = sync.NewCond(&r.mu)
	r.pins.Pin(&memory[0])
	if r.x, err = d.expose(memory); err != nil {
		r.pins.Unpin()
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.regions = append(d.regions, r)
	return r, nil
}

// Memory implements transport.Region.
func (r *region) Memory() []byte { return r.memory }

// Release implements transport.Region. It waits for a read that is under way, as long as its connection lives.
func (r *region) Release() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.released {
		return
	}
	r.released = true
	for r.busy > 0 {
		r.idle.Wait()
	}
	r.device.mu.Lock()
	r.device.regions = slices.DeleteFunc(r.device.regions, func(other *region) bool { return other == r })
	r.device.mu.Unlock()
	r.x.hide()
	r.pins.Unpin()
}

// enter begins a read into the region, unless it was released.
func (r *region) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.released {
		r.busy++
	}
	return !r.released
}

func (r *region) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy--
	r.idle.Broadcast()
}

// of is the region that has all of b, or nil.
func (d *device) of(b []byte) *region {
	d.mu.Lock()
	defer d.mu.Unlock()
	first := uintptr(unsafe.Pointer(&b[0]))
	for _, r := range d.regions {
		if begin := uintptr(unsafe.Pointer(&r.memory[0])); first >= begin && first+uintptr(len(b)) <= begin+uintptr(len(r.memory)) {
			return r
		}
	}
	return nil
}

// expose is registered memory for the peer to read. own says that it was registered for this, and is to be hidden.
func (c *conn) expose(b []byte) (x exposed, own bool, err error) {
	if r := c.device.of(b); r != nil {
		x = r.x
		x.address += uint64(uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&r.memory[0])))
		return x, false, nil
	}
	x, err = c.device.expose(b)
	return x, err == nil, err
}

// into is memory that is read into, registered where that is needed.
func (c *conn) into(b []byte) (x exposed, own bool, err error) {
	if !c.device.local {
		return exposed{}, false, nil
	}
	return c.expose(b)
}

// grant is what the peer of a connection may write into.
type grant struct {
	region *region
	token  wire.Token
}

// writable is a connection with one-sided writes (transport.OneSided). The writer says where its bytes are, and the owner of the memory
// reads them from there, piece by piece, after it has checked the token: no peer ever writes into this process.
type writable struct {
	*stream.Conn
	c *conn
}

// withWrites gives a connection one-sided writes, where the payloads of tensors need no tags: what is written has none.
func withWrites(s *stream.Conn) transport.Conn {
	if c, ok := s.NetConn().(*conn); ok && !c.all {
		return writable{s, c}
	}
	return s
}

// Grant implements transport.OneSided.
func (w writable) Grant(of transport.Region, offset, length int) (wire.Token, error) {
	c := w.c
	r, ok := of.(*region)
	switch {
	case !ok || r.device != c.device:
		return wire.Token{}, errors.New("granting a region of another transport")
	case offset < 0 || length < 1 || length > len(r.memory)-offset:
		return wire.Token{}, fmt.Errorf("granting %d bytes from %d on of a region of %d", length, offset, len(r.memory))
	case !r.enter():
		return wire.Token{}, errors.New("granting a region that was released")
	}
	r.leave()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.over {
		return wire.Token{}, net.ErrClosed
	}
	t := wire.Token{Region: r.number, Key: unique.Number(), Offset: uint64(offset), Length: uint64(length)}
	c.grants[t.Key] = grant{r, t}
	return t, nil
}

// Revoke implements transport.OneSided.
func (w writable) Revoke(t wire.Token) {
	c := w.c
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.grants, t.Key)
	for c.pull.region != nil && c.pull.key == t.Key {
		c.changed.Wait()
	}
}

// WriteTo implements transport.OneSided.
func (w writable) WriteTo(t wire.Token, at int, buffers net.Buffers) error {
	left := 0
	for _, b := range buffers {
		left += len(b)
	}
	if left == 0 {
		return nil
	}
	return w.Aside(func() error { return w.c.writeTo(t, at, left, buffers) })
}

func (c *conn) writeTo(t wire.Token, at, left int, buffers net.Buffers) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lending(func() error {
		for _, b := range buffers {
			if len(b) == 0 {
				continue
			}
			if err := c.room(); err != nil {
				return err
			}
			left -= len(b)
			fill := func(slot []byte) int {
				putWrite(slot, t, uint64(at), uint64(left))
				return writeSize
			}
			if err := c.lend(b, fill, kindWrite); err != nil {
				return err
			}
			at += len(b)
		}
		return nil
	})
}

// pull is a read of a piece of what the peer writes.
type pull struct {
	region *region // nil while there is none
	key    uint64  // of the token
	bytes  uint64
	into   exposed
	own    bool // into was registered for this
}

// startPull begins to read the next piece of what the peer writes, if it is granted.
func (c *conn) startPull() {
	if c.pull.region != nil || len(c.writes) == 0 || c.over || c.closed || c.cause != nil {
		return
	}
	m := &c.writes[0]
	g, refused := c.check(m)
	if refused != "" {
		c.fail(fmt.Errorf("%w: region %d: %s", transport.ErrAccess, m.token.Region, refused))
		return
	}
	p := pull{region: g.region, key: m.token.Key, bytes: min(m.length, pieceBytes)}
	b := g.region.memory[m.token.Offset+m.at:][:p.bytes]
	var err error
	if p.into, p.own, err = c.into(b); err == nil {
		err = c.device.read(c.pulls, b, p.into, c.peer, m.address, m.key)
	}
	c.pull = p
	if err != nil {
		c.endPull()
	}
	switch {
	case errors.Is(err, errAgain):
		c.retrySoon()
	case err != nil:
		c.fail(err)
	}
}

// endPull ends the read that is under way, if any: nothing touches its memory any more.
func (c *conn) endPull() {
	if c.pull.region == nil {
		return
	}
	if c.pull.own {
		c.pull.into.hide()
	}
	c.pull.region.leave()
	c.pull = pull{}
	c.changed.Broadcast()
	c.finished()
}

// check enters the region of a write, or says why it is refused.
func (c *conn) check(m *message) (g grant, refused string) {
	g, ok := c.grants[m.token.Key]
	length := m.length + m.left // both are bounded, or do not fit
	switch {
	case !ok || g.token != m.token:
		return g, "its token was not given on this connection, or was revoked"
	case m.left > g.token.Length || m.at > g.token.Length || length > g.token.Length-m.at: // all of it, so that a refused one changes nothing
		return g, fmt.Sprintf("%d bytes from %d on are not within the %d that were granted", length, int64(m.at), g.token.Length)
	case !g.region.enter():
		return g, "the region was released"
	}
	return g, ""
}

// pulled handles the end of a piece.
func (c *conn) pulled(err error) {
	bytes := c.pull.bytes
	c.endPull()
	if err != nil {
		c.fail(err)
	}
	if c.over || c.cause != nil {
		return
	}
	m := &c.writes[0]
	m.address, m.at, m.length = m.address+bytes, m.at+bytes, m.length-bytes
	if m.length == 0 {
		slot := m.slot
		c.writes = c.writes[1:]
		c.giveBack(slot, 1)
	}
	c.startPull()
}
