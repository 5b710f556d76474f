package server

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// exchange holds what one rank puts until the others have got it: the data of broadcast, allgather
// and alltoall. An item lives for one iteration only.
type exchange struct {
	mu    sync.Mutex
	items map[itemID]*item
}

type itemID struct {
	tensor    uint32
	part      uint32
	iteration uint64
	route     uint64
}

// item is one partition on its way. It is ready once it was put; before, it only has waiters.
//
// Invariant: refs is the number of readers whose reply has not left yet; at zero the memory is let go.
type item struct {
	r       *round
	ready   bool
	h       wire.Header // of the put
	data    []byte
	confirm *conn       // of who put it and wants to know when all have it; nil for nobody
	local   *localOp    // put by this process's worker, whose tensor data is; nil when data is from the pool
	readers rankset.Set // that have not asked yet
	waiters []getter
	refs    atomic.Int32
	err     error // why a local put ended before all had read it
}

// getter is a rank that asks for an item: over its connection, or in this process.
type getter struct {
	rank  int
	conn  *conn
	local *localOp
}

// Sent implements outbox.Owner: one reader has its reply.
func (it *item) Sent(error) { it.drop(1) }

func (it *item) drop(n int) {
	if n == 0 || it.refs.Add(-int32(n)) != 0 {
		return
	}
	if it.local != nil {
		it.local.done(0, it.err)
		return
	}
	it.r.s.pool.Put(it.data)
	if it.confirm != nil && it.err == nil {
		it.confirm.send(outbox.Frame{Header: it.answer(wire.TypeResult)})
	}
}

// answer is the header of a reply that belongs to the item.
func (it *item) answer(typ wire.Type) wire.Header {
	h := &it.h
	return wire.Header{Type: typ, DType: h.DType, Epoch: h.Epoch, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Aux: h.Aux, Rank: h.Rank}
}

// put takes in one partition over the connection.
func (c *conn) put(h *wire.Header, p *payload) error {
	t, err := c.r.tensor(h)
	if err != nil {
		return err
	}
	if src, dst := wire.Endpoints(h.Aux); src != c.rank || dst != -1 && !t.ranks.Has(dst) {
		return fmt.Errorf("put of %q from rank %d for rank %d, which are not the sender and a rank of %v", t.Name, src, dst, t.ranks)
	}
	if !t.enter(h) {
		return p.discard()
	}
	buf, err := c.r.s.pool.Get(int(h.Length))
	if err != nil {
		c.r.outOfMemory(t, h, err)
		return p.discard()
	}
	if err := p.into(buf); err != nil {
		c.r.s.pool.Put(buf)
		return err
	}
	it := &item{r: c.r, h: *h, data: buf}
	if h.Flags&wire.FlagHome != 0 {
		it.confirm = c
	}
	c.r.exchange.put(t, it)
	return nil
}

// get asks for one partition over the connection.
func (c *conn) get(h *wire.Header) error {
	t, err := c.r.tensor(h)
	if err != nil {
		return err
	}
	if src, dst := wire.Endpoints(h.Aux); !t.ranks.Has(src) || dst != -1 && dst != c.rank {
		return fmt.Errorf("get of %q from rank %d for rank %d, which are not a rank of %v and the sender", t.Name, src, dst, t.ranks)
	}
	if !t.enter(h) {
		return nil
	}
	c.r.exchange.get(t, h, getter{rank: c.rank, conn: c})
	return nil
}

func idOf(h *wire.Header) itemID { return itemID{h.Tensor, h.Part, h.Iteration, h.Aux} }

// put makes an item ready and serves those who wait for it.
func (x *exchange) put(t *tensor, it *item) {
	src, dst := wire.Endpoints(it.h.Aux)
	id := idOf(&it.h)
	x.mu.Lock()
	if dst >= 0 {
		it.readers = rankset.Of(dst)
	} else {
		it.readers = t.ranks.Minus(it.r.joinedRanks()) // those that join from here on find the item
		it.readers.Remove(src)
	}
	n := it.readers.Len()
	it.refs.Store(int32(max(n, 1)))
	before := x.items[id]
	if t.gone(it.h.Iteration) {
		it.err = wire.ErrCancelled
	}
	if it.err != nil || n == 0 || before != nil && before.ready { // given up, read by nobody, or put twice: the first one stands
		x.mu.Unlock()
		it.drop(max(n, 1))
		return
	}
	if before != nil {
		it.waiters = before.waiters
	}
	it.ready = true
	x.items[id] = it
	due := x.serve(id, it)
	x.mu.Unlock()
	it.reply(due)
}

func (x *exchange) get(t *tensor, h *wire.Header, g getter) {
	id := idOf(h)
	x.mu.Lock()
	if t.gone(h.Iteration) {
		x.mu.Unlock()
		if g.local != nil {
			g.local.done(0, wire.ErrCancelled)
		}
		return
	}
	it := x.items[id]
	if it == nil {
		it = &item{r: t.r}
		x.items[id] = it
	}
	it.waiters = append(it.waiters, g)
	due := x.serve(id, it)
	x.mu.Unlock()
	it.reply(due)
}

// serve takes out the waiters of a ready item, and the item when nobody else will ask. On the home
// server it waits until all have asked: so no rank ends a broadcast well before it is known that every
// rank brings the same.
func (x *exchange) serve(id itemID, it *item) []getter {
	if !it.ready || it.h.Flags&wire.FlagHome != 0 && !it.wanted().Covers(it.readers) {
		return nil
	}
	due := it.waiters[:0]
	for _, g := range it.waiters {
		if it.readers.Remove(g.rank) {
			due = append(due, g)
		}
	}
	it.waiters = nil
	if it.readers.Len() == 0 {
		delete(x.items, id)
	}
	return due
}

// wanted is the set of ranks that wait for the item.
func (it *item) wanted() (ranks rankset.Set) {
	for _, g := range it.waiters {
		ranks.Add(g.rank)
	}
	return ranks
}

func (it *item) reply(due []getter) {
	for _, g := range due {
		if g.local != nil {
			err := g.local.take(it.data)
			it.drop(1)
			g.local.done(0, err)
			continue
		}
		g.conn.send(outbox.Frame{Header: it.answer(wire.TypeResult), Payload: it.data, Owner: it})
	}
}

// without lets a rank go that will not read what it has not asked for: it has joined.
func (x *exchange) without(rank int) {
	x.mu.Lock()
	left := map[*item][]getter{}
	for id, it := range x.items {
		if it.ready && it.readers.Remove(rank) {
			left[it] = x.serve(id, it)
		}
	}
	x.mu.Unlock()
	for it, due := range left {
		it.reply(due)
		it.drop(1)
	}
}

// cancel forgets items; local operations end with err.
func (x *exchange) cancel(which func(itemID) bool, err error) {
	x.mu.Lock()
	var dropped []*item
	for id, it := range x.items {
		if which(id) {
			dropped = append(dropped, it)
			delete(x.items, id)
		}
	}
	x.mu.Unlock()
	for _, it := range dropped {
		for _, g := range it.waiters {
			if g.local != nil {
				g.local.done(0, err)
			}
		}
		if it.ready {
			it.err = err
			it.drop(it.readers.Len())
		}
	}
}
