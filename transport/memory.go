package transport

import (
	"errors"
	"net"
	"unsafe"

	"github.com/paceline/paceline/transport/wire"
)

// ErrAccess is wrapped by the error that ends a connection whose peer wrote where it was granted nothing.
var ErrAccess = errors.New("a write into memory that is not granted")

// Registrar is what a Transport is if memory can be registered with it: made known once, ahead of use, so that adapters
// or peers reach it without a copy.
type Registrar interface {
	// Register registers memory of at least one byte. The same memory, or a part of it, can be registered again: that is a
	// further region with a life of its own.
	Register(memory []byte) (Region, error)
}

// Region is memory that is registered with a transport.
//
//  1. The memory belongs to whoever registered it. It stays alive, and where it is, until Release has returned.
//  2. A region outlives the connections in which it was granted; the end of a connection ends that connection's grants.
//  3. A peer that is in the middle of a write when the region is released has put the bytes before Release there, and
//     none after: what is left of the write is one into memory that is not granted.
type Region interface {
	// Memory is what was registered.
	Memory() []byte
	// Release ends the registration and every grant of it. When it returns no peer and no adapter touches the memory any
	// more. Sends of the own process that read from it must have returned before. It may be called twice.
	Release()
}

// OneSided is what a Conn is if its peer's memory can be written without a receive on its side.
//
// The owner of the memory registers it, grants a part of it to the peer of one connection, and sends the token of the
// grant in a frame. The peer writes, and tells of it by a frame of its own. The side that owns the memory checks each write:
// one that goes beyond the token's part, or whose token was given on another connection, was revoked, or is of a region
// that was released, ends this connection with ErrAccess on the owner's side. It changes no memory, and no other
// connection notices.
type OneSided interface {
	// Grant lets the peer write into length bytes of a region, from offset on, until Revoke, the region's Release or the
	// end of the connection. A part that the region does not have is an error, and nothing is granted.
	Grant(r Region, offset, length int) (wire.Token, error)
	// Revoke ends a grant. When it returns the peer writes no more by it. A grant that has ended is no error.
	Revoke(t wire.Token)
	// WriteTo writes the buffers, one behind the other, into the peer's memory from byte at of the token's part on. It
	// returns when the buffers may be used again or the connection has failed. Writes and sends do not mix, and keep
	// their order: whoever reads a frame that was sent after WriteTo returned finds the bytes in its memory. No byte
	// is no write. It consumes the slice itself, as net.Buffers does.
	WriteTo(t wire.Token, at int, buffers net.Buffers) error
}

// Lender is what a Conn is if its ends may lend each other memory, because they are processes of one host: what lies there is read and
// written in place, and does not travel. The memory is the lender's: it hears by frames when the borrower is done with a part.
type Lender interface {
	// Lends is the memory of this process that the peer has mapped whole; nil for none.
	Lends() Arena
	// Borrow is a part of what the peer lends. It may be used until Return, also behind the end of the connection. A part that is not
	// there is an error.
	Borrow(offset, length uint64) ([]byte, error)
	// Return ends one Borrow.
	Return()
}

// Arena is memory of a process that it lends as a whole.
type Arena interface {
	// Memory is all of it; its addresses never change.
	Memory() []byte
	// Alloc gives zeros, whole pages; nil where there is no room.
	Alloc(bytes int) []byte
	// Free gives back what Alloc gave, and reports whether there is such memory. No peer uses it any more.
	Free(at unsafe.Pointer) bool
	// Abandon is Free for memory that a peer may still use. It comes back where the arena is renewed.
	Abandon(at unsafe.Pointer)
}

// Lends is what this process lends the peer of a connection; nil for nothing.
func Lends(c Conn) Arena {
	if l, ok := c.(Lender); ok {
		return l.Lends()
	}
	return nil
}
