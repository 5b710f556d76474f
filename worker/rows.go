package worker

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// In an elastic job broadcasts and allgathers go the way of sums (decision 125): each rank pushes what it gives, nothing or its rows, and keeps what all get, to
// supply it where a server is lost. So all ranks that are left have the same, whoever is lost meanwhile.
//
// A broadcast has a partition more than its bytes: a rank that pushes that has them. With the answer all have, and nobody keeps them any more. An allgather has
// limits.RowParts more than its sizes, and uses as many of them as its rows are long. What a lost rank has given one of them and not another is of no use, and no rank takes it; nor what one
// has given that alone had got the sizes: where their server was lost as well, the others have summed them anew, without it.

// secondStage are the partitions of the stage behind the first: that with which ranks say that they have a broadcast or an alltoall, or those in which rows travel, whose length is
// known after the sizes.
func (b *book) secondStage(kind units.Kind) []uint32 {
	switch {
	case !b.epoch().Elastic:
	case kind == units.Broadcast || kind == units.Alltoall:
		return []uint32{0}
	case kind == units.Allgather:
		return slices.Repeat([]uint32{8}, limits.RowParts)
	}
	return nil
}

// confirm is the second stage of a broadcast.
func (o *operation) confirm() {
	o.run([]*task{o.hasAll()}, func() {
		o.e.kept.spend(o.d, 0)
		o.finish()
	})
}

// rows are those of an allgather on their way. Each answer has a piece of every rank's.
type rows struct {
	o       *operation
	bytes   []int64       // that each rank gives
	at      []int64       // where they go
	parts   int           // that they travel in
	lacking []atomic.Bool // ranks of which pieces are missing
}

// gatherRows is the second stage of an allgather.
func (o *operation) gatherRows(bytes []int64) {
	step := int64(o.e.cfg.PartitionBytes)
	x := &rows{o: o, bytes: bytes, at: make([]int64, len(bytes)), lacking: make([]atomic.Bool, len(bytes))}
	var total int64
	for i, n := range bytes {
		x.at[i] = total
		total += n
	}
	x.parts = int(min((total+step-1)/step, limits.RowParts))
	o.e.kept.spend(o.d, 1) // who has brought its sizes has the rows of the allgather before
	me := o.e.member(&o.Op)
	tasks := make([]*task, x.parts)
	for i := range tasks {
		if n := x.most(i); n > limits.MaxPayload {
			o.giveUp(fmt.Errorf("%w: %v travels in %d partitions in an elastic job, which would have %d bytes each, limit %d", ErrMemory, o, x.parts, n, limits.MaxPayload))
			o.finish()
			return
		}
		part := i + 1
		t := &task{o: o, h: o.header(wire.TypePush, part, units.Int64), server: o.d.server(part), answer: true, rows: x}
		t.h.Before = o.d.had()
		if from, to := x.piece(me, i); from < to {
			t.give(o.Input, from, to)
		} else {
			t.h.Flags |= wire.FlagEmpty
		}
		tasks[i] = t
	}
	o.run(tasks, func() {
		x.end()
		o.finish()
	})
}

// index is which of them a partition is.
func (x *rows) index(part uint32) int { return int(part) - 1 }

// piece is what a rank, by its place in the process set, gives one of them.
func (x *rows) piece(member, i int) (from, to int64) {
	n := x.bytes[member]
	return n * int64(i) / int64(x.parts), n * int64(i+1) / int64(x.parts)
}

// most is how long an answer is in which nobody's piece is missing.
func (x *rows) most(i int) (bytes int64) {
	for member := range x.bytes {
		from, to := x.piece(member, i)
		bytes += to - from
	}
	return wire.RowsSize(len(x.bytes), bytes)
}

// take puts the pieces of an answer where they go.
func (x *rows) take(part uint32, answer []byte, from fmt.Stringer) error {
	pieces := make(wire.Rows, len(x.bytes))
	err := pieces.Decode(answer)
	for member, piece := range pieces {
		begin, end := x.piece(member, x.index(part))
		switch {
		case err != nil || x.bytes[member] == 0:
		case int64(len(piece)) == end-begin:
			copy(x.o.out.Data[x.at[member]+begin:], piece)
		case len(piece) == 0:
			x.lacking[member].Store(true)
		default:
			err = fmt.Errorf("rank %d gives %d bytes, after it has announced %d", x.o.Set.Ranks[member], len(piece), end-begin)
		}
	}
	if err != nil {
		return fmt.Errorf("partition %d of %q on rank %d: the answer of %v: %w", part, x.o.name(), x.o.e.cfg.Rank, from, err)
	}
	return nil
}

// end takes out the rows of ranks that were lost in the middle.
func (x *rows) end() {
	out, kept := &x.o.out, int64(0)
	for member, n := range x.bytes {
		if x.lacking[member].Load() {
			out.Rows[member] = 0
			out.Value--
			continue
		}
		if kept < x.at[member] {
			copy(out.Data[kept:], out.Data[x.at[member]:x.at[member]+n])
		}
		kept += n
	}
	if out.Data != nil {
		out.Data = out.Data[:kept]
	}
}
