package transporttest

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Watch is what a test does to the frames of a network that it watches (Watched). Both functions are called on many
// goroutines.
type Watch struct {
	// Hold is how long a frame is held back before its reader gets it. Frames of one connection stay in their order, as
	// TCP keeps it; those of others overtake. The link is one direction of one connection, "to<-from/number".
	Hold func(link string, t wire.Type) time.Duration
	// Read is told each frame that is read, those of a batch too.
	Read func(t wire.Type)

	mu    sync.Mutex
	made  map[string]int // connections by "to<-from"
	conns map[*watchedConn]string
	dead  map[string]bool
}

// Watched is the transport of a node whose connections are watched. It listens at a port of its own choice where the
// address has another host.
func (n *Network) Watched(name string, secret []byte, w *Watch) transport.Transport {
	return &watchedNode{n.Node(name, secret), name, w}
}

// Kill ends all connections of a node at once, without a goodbye, and lets it make no more.
func (w *Watch) Kill(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead == nil {
		w.dead = map[string]bool{}
	}
	w.dead[name] = true
	for c, of := range w.conns {
		if of == name {
			_ = c.Conn.Close()
		}
	}
}

// Revive lets a node that was killed make connections again.
func (w *Watch) Revive(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.dead, name)
}

// adopt makes a connection of a node a watched one.
func (w *Watch) adopt(node string, c transport.Conn) (transport.Conn, error) {
	remote, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead[node] {
		_ = c.Close()
		return nil, fmt.Errorf("%s was killed: %w", node, net.ErrClosed)
	}
	if w.made == nil {
		w.made, w.conns = map[string]int{}, map[*watchedConn]string{}
	}
	link := node + "<-" + remote
	w.made[link]++
	own := &watchedConn{Conn: c, w: w, link: fmt.Sprint(link, "/", w.made[link])}
	w.conns[own] = node
	return own, nil
}

type watchedNode struct {
	transport.Transport
	name string
	w    *Watch
}

func (n *watchedNode) Listen(address string) (transport.Listener, error) {
	if host, _, err := net.SplitHostPort(address); err == nil && host != n.name {
		address = ""
	}
	l, err := n.Transport.Listen(address)
	if err != nil {
		return nil, err
	}
	return &watchedListener{l, n}, nil
}

func (n *watchedNode) Dial(ctx context.Context, address string) (transport.Conn, error) {
	c, err := n.Transport.Dial(ctx, address)
	if err != nil {
		return nil, err
	}
	return n.w.adopt(n.name, c)
}

type watchedListener struct {
	transport.Listener
	n *watchedNode
}

func (l *watchedListener) Accept() (transport.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c, err = l.n.w.adopt(l.n.name, c); err == nil {
			return c, nil
		}
	}
}

// watchedConn is a connection whose frames are held back and counted. Its reader alone uses batch and left.
type watchedConn struct {
	transport.Conn
	w    *Watch
	link string

	batch []byte // what was read of a batch's headers
	left  int    // what of it is still to be read
}

// ReadHeader implements transport.Conn.
func (c *watchedConn) ReadHeader(h *wire.Header) error {
	if err := c.Conn.ReadHeader(h); err != nil {
		return err
	}
	time.Sleep(c.w.Hold(c.link, h.Type))
	c.w.Read(h.Type)
	if h.Type == wire.TypeBatch {
		c.batch, c.left = nil, int(h.Length)
	}
	return nil
}

// ReadPayload implements transport.Conn.
func (c *watchedConn) ReadPayload(b []byte) error {
	if err := c.Conn.ReadPayload(b); err != nil || c.left == 0 {
		return err
	}
	c.batch, c.left = append(c.batch, b...), c.left-len(b)
	if c.left > 0 {
		return nil
	}
	for headers := c.batch; len(headers) > 0; headers = headers[wire.HeaderSize:] {
		var h wire.Header
		if err := h.Decode(headers); err != nil {
			return err
		}
		c.w.Read(h.Type)
	}
	return nil
}

// Close implements transport.Conn.
func (c *watchedConn) Close() error {
	c.w.mu.Lock()
	delete(c.w.conns, c)
	c.w.mu.Unlock()
	return c.Conn.Close()
}
