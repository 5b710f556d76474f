// Package transfer keeps what one rank puts until the others have got it: the data of broadcast, allgather and alltoall.
package transfer

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// Room keeps the items of one round. An item lives for one iteration only.
type Room struct {
	round *room.Round

	begun atomic.Int64 // items that some reader has, and whose operation has not ended for the rank that put them

	mu    lockorder.Mutex
	items map[itemID]*item
}

type itemID struct {
	tensor    uint32
	part      uint32
	iteration uint64
	source    uint16
	dest      uint16
}

func idOf(h *wire.Header) itemID {
	return itemID{h.Tensor, h.Part, h.Iteration, h.Source, h.Destination}
}

// New makes an empty room.
func New(r *room.Round) *Room {
	x := &Room{round: r, items: map[itemID]*item{}}
	x.mu.Place(room.LevelTransfer, "transfer.Room.mu")
	return x
}

// Holds reports whether some rank has an item that others lack. All else its ranks can bring to another server, where they are told that it has
// ended: in an elastic job every put is answered.
func (x *Room) Holds() bool { return x.begun.Load() > 0 }

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
	it := &item{h: q.Header, t: t, room: x}
	if q.Reply.Local() || q.Has(wire.FlagHome) || x.round.Elastic {
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
	before := x.items[id]
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
	x.items[id] = it
	return x.serve(id, it), true
}

// serve takes out the readers of an item that are due, and the item with the last of them.
func (x *Room) serve(id itemID, it *item) []reader {
	waited := len(it.waiting)
	due, last := it.due()
	x.round.Pool.Refund((waited - len(it.waiting)) * room.WaitingBytes)
	if last {
		delete(x.items, id)
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
	it = x.items[id]
	if it == nil {
		it = &item{t: t, room: x}
		x.items[id] = it
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
	for id, it := range x.items {
		switch {
		case it.ready && it.readers.Remove(rank):
			freed = append(freed, ready{it, x.serve(id, it)})
		case !it.ready && int(id.source) == rank:
			for _, r := range it.waiting {
				failed = append(failed, missed{it.t, r.seq})
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
	x.forget(func(id itemID) bool { return id.tensor == tensor && id.iteration >= from }, err)
}

// End forgets every item.
func (x *Room) End(err error) { x.forget(func(itemID) bool { return true }, err) }

func (x *Room) forget(which func(itemID) bool, err error) {
	var dropped []*item
	x.mu.Lock()
	for id, it := range x.items {
		if which(id) {
			it.err = err
			dropped = append(dropped, it)
			delete(x.items, id)
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
