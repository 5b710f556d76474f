package transfer

import (
	"sync/atomic"

	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// item is one partition on its way. It is ready once it was put; before, it only has readers that wait.
//
// Invariant: refs is the number of readers whose reply has not left yet; at zero the memory is let go.
type item struct {
	h      wire.Header // of the put
	data   []byte
	t      *room.Tensor
	pool   *mempool.Pool // data goes back there; nil where it is the tensor of the worker in this process
	putter room.Reply    // of who put it, where that wants to know when all have it
	refs   atomic.Int32

	// Guarded by the room's lock, and changed by nobody once the item has left the room.
	ready   bool
	readers rankset.Set // that have not asked yet
	waiting []reader
	err     error // why the putter's operation ended before all had read
}

// reader is a rank that asks for an item.
type reader struct {
	rank int
	seq  uint64 // of its request
	to   room.Reply
}

// expect says who will read an item that is put.
func (it *item) expect(t *room.Tensor) {
	src, dst := it.h.Endpoints()
	if dst >= 0 {
		it.readers = rankset.Of(dst)
	} else {
		it.readers = t.Members.Clone()
		it.readers.Remove(src)
	}
	it.readers.Subtract(t.Lost())
	it.refs.Store(int32(max(it.readers.Len(), 1)))
}

// due takes out the readers of a ready item, and reports whether nobody else will ask. On the home server they wait
// until all have asked: so no rank ends a broadcast well before it is known that every rank brings the same.
func (it *item) due() (due []reader, last bool) {
	if !it.ready || it.h.Flags&wire.FlagHome != 0 && !it.wanted().Covers(it.readers) {
		return nil, false
	}
	due = it.waiting[:0]
	for _, r := range it.waiting {
		if it.readers.Remove(r.rank) {
			due = append(due, r)
		}
	}
	it.waiting = nil
	return due, it.readers.Len() == 0
}

// wanted is the set of ranks that wait for the item.
func (it *item) wanted() (ranks rankset.Set) {
	for _, r := range it.waiting {
		ranks.Add(r.rank)
	}
	return ranks
}

// reply sends the item to readers.
func (it *item) reply(due []reader) {
	for _, r := range due {
		r.to.Send(it.answer(r.seq), it.data, it)
	}
}

// answer is the header of a reply that belongs to the item, to a request.
func (it *item) answer(seq uint64) wire.Header {
	h := &it.h
	return wire.Header{
		Type: wire.TypeResult, DType: h.DType, Epoch: h.Epoch, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Seq: seq,
		Source: h.Source, Destination: h.Destination, Flags: h.Flags & wire.FlagAuthenticated,
	}
}

// Sent implements room.Owner: one reader has its reply.
func (it *item) Sent(error) { it.release(1) }

// release lets go of n readers' hold on the item. With the last it ends the putter's operation; ranks elsewhere hear of
// an operation that was given up by its name.
func (it *item) release(n int) {
	if n == 0 || it.refs.Add(-int32(n)) != 0 {
		return
	}
	if it.pool != nil {
		it.pool.Put(it.data)
	}
	if it.err != nil {
		it.putter.Fail(it.err)
		return
	}
	it.putter.Confirm(it.answer(it.h.Seq))
}
