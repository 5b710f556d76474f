// Package room is what the server's shell and its rooms (sums, held, transfer) say to each other: the request with its
// payload and the place for its reply, the tensor that it is of, what a room needs of the shell, and the order of the
// role's locks. A room knows no connection and no round.
package room

import (
	"github.com/paceline/paceline/transport/wire"
)

// Request is one operation of a rank on one partition, whether it came over a socket or from the worker in this
// process. It is the caller's again when Serve returns; what outlives that (Reply, memory that is InPlace) is copied out
// of it.
type Request struct {
	wire.Header
	Payload Payload
	Reply   Reply
}

// From is the rank that asks.
func (q *Request) From() int { return int(q.Rank) }

// Moved answers that the partition has been moved to another server.
func (q *Request) Moved() { q.Reply.Moved(q.Header) }

// Has reports whether the header has a flag.
func (q *Request) Has(f wire.Flags) bool { return q.Flags&f != 0 }
