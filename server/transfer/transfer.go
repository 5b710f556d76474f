// Package transfer keeps what one rank puts until the others have got it: the data of broadcast, allgather and alltoall.
package transfer

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Room keeps the items of one round. An item lives for one iteration only.
type Room struct {
	round *room.Round

	mu    lockorder.Mutex
	items map[uint32]*tensorItems
}

// tensorItems are those of one tensor, while there are any.
type tensorItems struct {
	newest uint64 // iteration
	items  map[itemID]*item
}

type itemID struct {
	part      uint32
	iteration uint64
	source    uint16
	dest      uint16
}

func idOf(h *wire.Header) itemID {
	return itemID{h.Part, h.Iteration, h.Source, h.Destination}
}

// New makes an empty room.
func New(r *room.Round) *Room {
	x := &Room{round: r, items: map[uint32]*tensorItems{}}
	x.mu.Place(room.LevelTransfer, "transfer.Room.mu")
	return x
}

// Serve handles a put or a get. An error is of a peer that does not keep to the protocol.
func (x *Room) Serve(t *room.Tensor, q *room.Request) error {
	if q.Type == wire.TypePut {
		return x.put(t, q)
	}
	return x.get(t, q)
}

// put makes an item ready and serves those who wait for it. What the worker in this process puts stays where it lies.
func (x *Room) put(t *room.Tensor, q *room.Request) error {
	src, dst := q.Endpoints()
	if src != q.From() || dst != -1 && !t.Members.Has(dst) {
		return fmt.Errorf("put of %q from rank %d for rank %d, which are not the sender and a rank of %v", t.Name, src, dst, t.Members)
	}
	it := &item{h: q.Header, t: t}
	if q.Reply.Local() || q.Has(wire.FlagHome) {
		it.putter = q.Reply
	}
	data, ok := q.Payload.InPlace()
	if !ok {
		lent, err := q.Payload.Lend(x.round.Pool)
		if errors.As(err, new(room.MemoryError)) {
			t.OutOfMemory(&q.Header, err)
			q.Reply.Fail(inprocess.ErrCancelled)
			return nil
		} else if err != nil {
			return err
		}
		data, it.pool = lent, x.round.Pool
	}
	it.data = data
	if due, stored := x.add(t, it); stored {
		it.reply(due)
	} else {
		it.release(int(it.refs.Load()))
	}
	return nil
}

// add files an item that is ready, unless it was given up, is read by nobody, or was put before: the first one stands.
func (x *Room) add(t *room.Tensor, it *item) (due []reader, stored bool) {
	id := idOf(&it.h)
	x.mu.Lock()
	defer x.mu.Unlock()
	it.expect(t)
	before := x.find(t.ID, id)
	if t.Gone(it.h.Iteration) {
		it.err = inprocess.ErrCancelled
	}
	if it.err != nil || it.readers.Len() == 0 || before != nil && before.ready {
		return nil, false
	}
	if before != nil {
		it.waiting = before.waiting
	}
	it.ready = true
	x.file(id, it)
	return x.serve(id, it), true
}

// find gives an item, nil for none. The caller holds the lock.
func (x *Room) find(tensor uint32, id itemID) *item {
	if of := x.items[tensor]; of != nil {
		return of.items[id]
	}
	return nil
}

// file adds an item, or takes another for it. The caller holds the lock.
func (x *Room) file(id itemID, it *item) {
	of := x.items[it.t.ID]
	if of == nil {
		of = &tensorItems{items: map[itemID]*item{}}
		x.items[it.t.ID] = of
	}
	if of.newest < id.iteration {
		of.newest = id.iteration
		if x.round.Elastic {
			x.forgetRead(of)
		}
	}
	of.items[id] = it
}

// forgetRead forgets what has been put again because a server was lost, for ranks that had it already: a rank that begins an iteration knows that all ranks have what was
// before (decision 126).
func (x *Room) forgetRead(of *tensorItems) {
	for id, it := range of.items {
		if id.iteration < of.newest && it.ready && len(it.waiting) == 0 {
			delete(of.items, id)
			it.release(it.readers.Len())
		}
	}
}

// remove takes an item out. The caller holds the lock.
func (x *Room) remove(id itemID, it *item) {
	of := x.items[it.t.ID]
	if delete(of.items, id); len(of.items) == 0 {
		delete(x.items, it.t.ID)
	}
}

// serve takes out the readers of an item that are due, and the item with the last of them.
func (x *Room) serve(id itemID, it *item) []reader {
	waited := len(it.waiting)
	due, last := it.due()
	x.round.Pool.Refund((waited - len(it.waiting)) * room.WaitingBytes)
	if last {
		x.remove(id, it)
	}
	return due
}

// get asks for an item.
func (x *Room) get(t *room.Tensor, q *room.Request) error {
	src, dst := q.Endpoints()
	if !t.Members.Has(src) || dst != -1 && dst != q.From() {
		return fmt.Errorf("get of %q from rank %d for rank %d, which are not a rank of %v and the sender", t.Name, src, dst, t.Members)
	}
	if err := x.round.Pool.Charge(room.WaitingBytes); err != nil { // it may wait for good
		t.OutOfMemory(&q.Header, room.MemoryError{Err: err})
		q.Reply.Fail(inprocess.ErrCancelled)
		return nil
	}
	it, due, ok := x.ask(t, &q.Header, reader{q.From(), q.Seq, q.Reply})
	if !ok {
		x.round.Pool.Refund(room.WaitingBytes)
		q.Reply.Fail(inprocess.ErrCancelled)
		return nil
	}
	it.reply(due)
	if src, _ := q.Endpoints(); t.Lost().Has(src) {
		x.Lose(src) // which may have gone before the item was there to be found
	}
	return nil
}

// ask files a reader with its item, unless that was given up.
func (x *Room) ask(t *room.Tensor, h *wire.Header, r reader) (it *item, due []reader, ok bool) {
	id := idOf(h)
	x.mu.Lock()
	defer x.mu.Unlock()
	if t.Gone(h.Iteration) {
		return nil, nil, false
	}
	if it = x.find(t.ID, id); it == nil {
		it = &item{t: t}
		x.file(id, it)
	}
	it.waiting = append(it.waiting, r)
	return it, x.serve(id, it), true
}

// Lose has the items of an elastic job go on without a rank that has gone: nobody waits for it as a reader, and what it was
// to give and has not ends with an error on every rank.
func (x *Room) Lose(rank int) {
	type ready struct {
		it  *item
		due []reader
	}
	type missed struct {
		t   *room.Tensor
		seq uint64
	}
	var freed []ready
	var failed []missed
	x.mu.Lock()
	for _, of := range x.items {
		for id, it := range of.items {
			switch {
			case it.ready && it.readers.Remove(rank):
				freed = append(freed, ready{it, x.serve(id, it)})
			case !it.ready && int(id.source) == rank:
				for _, r := range it.waiting {
					failed = append(failed, missed{it.t, r.seq})
				}
			}
		}
	}
	x.mu.Unlock()
	for _, f := range freed {
		f.it.reply(f.due)
		f.it.release(1)
	}
	for _, f := range failed {
		f.t.Shell.Fail(f.seq, units.FailUnsupported, fmt.Sprintf("rank %d has gone before all had what it gives", rank))
	}
}

// Cancel forgets a tensor's items from an iteration on; operations of the worker in this process end with err.
func (x *Room) Cancel(tensor uint32, from uint64, err error) {
	x.forget(func(of uint32, id itemID) bool { return of == tensor && id.iteration >= from }, err)
}

// End forgets every item.
func (x *Room) End(err error) { x.forget(func(uint32, itemID) bool { return true }, err) }

func (x *Room) forget(which func(tensor uint32, id itemID) bool, err error) {
	var dropped []*item
	x.mu.Lock()
	for tensor, of := range x.items {
		for id, it := range of.items {
			if which(tensor, id) {
				it.err = err
				dropped = append(dropped, it)
				x.remove(id, it)
			}
		}
	}
	x.mu.Unlock()
	for _, it := range dropped {
		x.round.Pool.Refund(len(it.waiting) * room.WaitingBytes)
		for _, r := range it.waiting {
			r.to.Fail(err)
		}
		if it.ready {
			it.release(it.readers.Len())
		}
	}
}
