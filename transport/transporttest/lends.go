package transporttest

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/paceline/paceline/transport"
)

// arenaBytes is the size of a node's arena: a small job's worth.
const arenaBytes = 8 << 20

// pageBytes is what an arena's memory is cut at.
const pageBytes = 4 << 10

// arena is what a node lends the nodes that it connects to, where the network's nodes are processes of one host (Options.Lends). What was used once is not
// given out again, so that what a peer writes too late is seen by nobody; what another node writes into is behind no lock, as between processes.
type arena struct {
	network *Network
	memory  []byte
	used    int // behind the network's lock
}

// arenaOf is a node's arena; nil where nodes lend nothing. The caller holds the network's lock.
func (n *Network) arenaOf(node string) *arena {
	if !n.Lends {
		return nil
	}
	a := n.arenas[node]
	if a == nil {
		a = &arena{network: n, memory: make([]byte, arenaBytes)}
		n.arenas[node] = a
	}
	return a
}

// Memory implements transport.Arena.
func (a *arena) Memory() []byte { return a.memory }

// Alloc implements transport.Arena.
func (a *arena) Alloc(bytes int) []byte {
	a.network.mu.Lock()
	defer a.network.mu.Unlock()
	at, size := a.used, (bytes+pageBytes-1)&^(pageBytes-1)
	if size > arenaBytes-at {
		return nil
	}
	a.used += size
	return a.memory[at:][:bytes:bytes]
}

// Free implements transport.Arena.
func (a *arena) Free(unsafe.Pointer) bool { return true }

// Abandon implements transport.Arena.
func (a *arena) Abandon(unsafe.Pointer) {}

// Lends implements transport.Lender, for the end that has connected.
func (c *conn) Lends() transport.Arena {
	if c.lends == nil {
		return nil
	}
	return c.lends
}

// Borrow implements transport.Lender, for the other end.
func (c *conn) Borrow(offset, length uint64) ([]byte, error) {
	switch {
	case c.borrows == nil:
		return nil, errors.New("the peer lends no memory")
	case offset > arenaBytes || length > arenaBytes-offset:
		return nil, fmt.Errorf("%d bytes at %d of an arena of %d", length, offset, arenaBytes)
	}
	return c.borrows.memory[offset:][:length:length], nil
}

// Return implements transport.Lender.
func (c *conn) Return() {}
