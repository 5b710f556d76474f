package server

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// How a dedicated server leaves an elastic job empty (decision 84). Sums, transfers and messages need nothing: what the workers keep for the loss of a server is all
// that an heir has to have. The server shuts its door to transfers, messages and held values, gives the ranks what it holds of these and the residuals of its answers (decision 114), and
// says goodbye on every connection, behind its last answers. It reads on until the workers close their ends, so that none of those is lost; what it finds behind the door its
// rank brings to the heir.

// door counts who is served of those that must not be cut off.
type door struct{ word atomic.Uint64 }

const (
	inside uint64 = 1 // one who is served now
	shut   uint64 = 1 << 63
)

// pass serves a request, or drops it where the door is shut.
func (d *door) pass(q *room.Request, serve func() error) error {
	for {
		w := d.word.Load()
		if w&shut != 0 {
			return nil // the caller discards the payload
		}
		if d.word.CompareAndSwap(w, w+inside) {
			break
		}
	}
	defer d.word.Add(^uint64(0)) // one less inside
	return serve()
}

// shutIfEmpty shuts the door if nobody is inside, and reports whether nobody is.
func (d *door) shutIfEmpty() bool { return d.word.CompareAndSwap(0, shut) || d.word.Load() == shut }

// shutOthersOut shuts the door. Who is inside may stay.
func (d *door) shutOthersOut() { d.word.Or(shut) }

// Elastic reports whether the running round goes on without a server that leaves.
func (s *Server) Elastic() bool {
	r := s.running()
	return r != nil && r.members.Now().Elastic
}

const (
	// emptyEvery is how often a server that leaves looks whether nobody is inside its door.
	emptyEvery = time.Millisecond
	// emptyWithin is how many looks it takes while the door is open: nobody is kept out then. Under steady traffic there is no moment at which nobody is inside.
	emptyWithin = 100
)

// Drain waits until nobody is served that must not be cut off, shuts the door, gives the workers of the running round what only this server has, and says goodbye to them; or it waits
// until it has none any more.
func (s *Server) Drain() {
	r := s.running()
	if r == nil {
		return
	}
	look := time.NewTicker(emptyEvery)
	defer look.Stop()
	for looks := 1; !r.door.shutIfEmpty(); looks++ {
		if looks == emptyWithin {
			r.door.shutOthersOut()
		}
		select {
		case <-look.C:
		case <-r.deserted:
			return
		}
		if len(r.connected()) == 0 { // the job has given it up, or is over
			return
		}
	}
	r.mu.Lock()
	r.farewell = true
	r.mu.Unlock()
	r.settings.Leaves.Store(true) // ahead of the keys that there are: others are made with it
	for _, t := range r.inUse() {
		t.keys.Leave(r.sender)
	}
	for _, c := range r.connected() {
		c.send(farewellFrame)
	}
}

// sender sends to a rank, on its first connection; nil where it has none.
func (r *round) sender(rank int) room.Sender {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if conns := r.conns[rank]; len(conns) > 0 {
		return conns[0]
	}
	return nil
}

// farewellFrame is a goodbye after which the other end closes the connection.
var farewellFrame = outbox.Frame{Header: wire.Header{Type: wire.TypeBye}}

// connected are the connections of the workers.
func (r *round) connected() []*conn {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Concat(slices.Collect(maps.Values(r.conns))...)
}

// Left waits until the workers have closed their connections, after Drain. The error is that of ctx.
func (s *Server) Left(ctx context.Context) error {
	r := s.running()
	if r == nil {
		return nil
	}
	for _, c := range r.connected() {
		select {
		case <-c.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
