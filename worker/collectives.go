package worker

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// first starts the first stage of the operation. Allgather and alltoall exchange their sizes first, as a
// sum of vectors in which each rank fills its own part; the others know all sizes beforehand. The sum has memory of its
// own: a server that answers before it was asked writes nothing that is being sent.
func (o *operation) first() {
	switch o.Kind {
	case units.Allreduce:
		o.run(o.reduceTasks(o.Input, o.Output, o.DType), nil)
	case units.Barrier:
		o.run(o.reduceTasks(nil, nil, o.DType), nil)
	case units.Reducescatter:
		o.run(o.scatterTasks(), nil)
	case units.Broadcast:
		if o.e.epoch().Elastic {
			o.run(o.reduceTasks(o.Input, o.Output, units.Int64), o.confirm)
		} else {
			o.run(o.broadcastTasks(), nil)
		}
	case units.Accumulate:
		o.run(o.valueTasks(), nil)
	case units.Send:
		o.send()
	case units.Receive:
		o.receive()
	case units.Allgather:
		o.sizes = make([]byte, 8*len(o.Set.Ranks))
		binary.NativeEndian.PutUint64(o.sizes[8*o.e.member(&o.Op):], uint64(o.Shape[0])+1) // 0 is of a rank that is lost
		o.run(o.reduceTasks(slices.Clone(o.sizes), o.sizes, units.Int64), o.gather)
	case units.Alltoall:
		o.sizes = make([]byte, 8*len(o.Set.Ranks)*len(o.Set.Ranks))
		row := 8 * len(o.Set.Ranks) * o.e.member(&o.Op)
		for i, rows := range o.splits() {
			binary.NativeEndian.PutUint64(o.sizes[row+8*i:], uint64(rows))
		}
		o.run(o.reduceTasks(slices.Clone(o.sizes), o.sizes, units.Int64), o.exchange)
	}
}

func (o *operation) splits() []int64 {
	if o.Splits != nil {
		return o.Splits
	}
	n := len(o.Set.Ranks)
	s := make([]int64, n)
	for i := range s {
		s[i] = o.Shape[0] / int64(n)
	}
	return s
}

// header is what all frames of the operation have in common.
func (o *operation) header(typ wire.Type, part int, dtype units.DType) wire.Header {
	h := wire.Header{
		Type: typ, DType: dtype, Epoch: o.epoch, Tensor: o.d.t.ID, Part: uint32(part), Rank: uint16(o.e.cfg.Rank),
		Iteration: o.iteration, Seq: o.seq,
	}
	if o.Authenticated {
		h.Flags = wire.FlagAuthenticated
	}
	return h
}

// reduceTasks pushes every partition of in and pulls each result into out.
func (o *operation) reduceTasks(in, out []byte, dtype units.DType) []*task {
	parts := len(o.d.t.Parts) - len(o.e.secondStage(o.Kind))
	n := parts
	if o.d.host != nil {
		n++
	}
	if len(o.room) != n {
		o.room, o.list = make([]task, n), make([]*task, n)
	}
	for i := range parts {
		t := &o.room[i]
		from, to := o.d.offsets[i], o.d.offsets[i+1]
		*t = task{o: o, h: o.header(wire.TypePush, i, dtype), server: o.d.server(i), out: out[from:to], answer: true, finished: t.finished}
		t.h.Before = o.d.had()
		t.give(in, from, to)
		o.list[i] = t
	}
	if o.d.host != nil {
		o.onHost()
	} else {
		o.room[0].h.Flags |= wire.FlagHome
	}
	return o.list
}

// give makes a part of an input what the task brings. The value that is declared goes as it is.
func (t *task) give(in []byte, from, to int64) {
	if t.o.Empty || t.o.Kind.HasRoot() && t.o.Root != t.o.e.cfg.Rank {
		t.h.Flags |= wire.FlagEmpty
		return
	}
	t.in = in[from:to]
	t.encode = t.o.d.coding != nil && t.o.Use != units.Declare
}

// scatterTasks pushes every partition and pulls those of this rank's rows only.
func (o *operation) scatterTasks() []*task {
	from, to := placement.Rows(o.Shape[0], len(o.Set.Ranks), o.e.member(&o.Op))
	row := o.rowBytes()
	first, last := from*row, to*row
	tasks := make([]*task, len(o.d.t.Parts))
	for i := range tasks {
		a, b := o.d.offsets[i], o.d.offsets[i+1]
		t := &task{o: o, h: o.header(wire.TypePush, i, o.DType), server: o.d.server(i)}
		t.h.Before = o.d.had()
		t.give(o.Input, a, b)
		switch {
		case a >= first && b <= last && a < b:
			t.out, t.answer = o.Output[a-first:b-first], true
		case o.e.epoch().Elastic: // a push whose answer is here needs to be sent no more
			t.out, t.answer = make([]byte, b-a), true
		default:
			t.h.Flags |= wire.FlagNoPull
		}
		tasks[i] = t
	}
	tasks[0].h.Flags |= wire.FlagHome
	return tasks
}

// valueTasks declare, push or pull every partition of a value that the servers hold.
func (o *operation) valueTasks() []*task {
	tasks := make([]*task, len(o.d.t.Parts))
	for i := range tasks {
		from, to := o.d.offsets[i], o.d.offsets[i+1]
		t := &task{o: o, h: o.header(wire.TypePull, i, o.DType), server: o.d.server(i)}
		if o.gives(o.e.cfg.Rank) {
			t.h.Type = wire.TypePush
			t.give(o.Input, from, to)
		}
		if o.d.coding != nil {
			t.h.Reference = o.d.coding.parts[i].number
		}
		switch {
		case o.Use != units.Add:
			t.out, t.answer = o.Output[from:to], true
		case o.e.epoch().Elastic: // this rank keeps what the value is then
			t.out, t.answer = make([]byte, to-from), true
			t.h.Flags |= wire.FlagNow
		default:
			t.h.Flags |= wire.FlagNoPull
		}
		if o.Use == units.Declare {
			t.h.Flags |= wire.FlagDeclare
			t.h.Before = o.d.had()
		}
		if o.Use&units.ReadNow != 0 {
			t.h.Flags |= wire.FlagNow
		}
		if o.Use&units.Within != 0 {
			t.h.Flags |= wire.FlagWithin
		}
		if o.Use&units.Exact != 0 {
			t.h.Flags |= wire.FlagPlain
		}
		t.h.Significance = o.Significance
		tasks[i] = t
	}
	if o.Use == units.Declare {
		tasks[0].h.Flags |= wire.FlagHome
	}
	return tasks
}

// broadcastTasks has the root put every partition and the others get it. The root's bytes are spread
// over all servers, which pass them on.
func (o *operation) broadcastTasks() []*task {
	root := o.Root == o.e.cfg.Rank
	if root && len(o.Output) > 0 && &o.Output[0] != &o.Input[0] {
		copy(o.Output, o.Input)
	}
	tasks := make([]*task, len(o.d.t.Parts))
	for i := range tasks {
		from, to := o.d.offsets[i], o.d.offsets[i+1]
		t := &task{o: o, server: o.d.placed.Servers[i]}
		if root {
			t.h, t.in = o.header(wire.TypePut, i, o.DType), o.Input[from:to]
		} else {
			t.h, t.out, t.answer = o.header(wire.TypeGet, i, o.DType), o.Output[from:to], true
		}
		t.h.Source, t.h.Destination = wire.Route(o.Root, -1)
		tasks[i] = t
	}
	tasks[0].h.Flags |= wire.FlagHome
	tasks[0].answer = true // the root ends with the others, who may bring something else under the name
	return tasks
}

// gather is the second stage of allgather: everybody puts its rows and gets those of the others.
func (o *operation) gather() {
	rows := o.counts(o.sizes)
	for i, r := range rows {
		if r != 0 {
			rows[i]--
			o.out.Value++
		}
	}
	me := o.e.member(&o.Op)
	if rows[me] != o.Shape[0] {
		o.wrongSizes()
		return
	}
	bytes, ok := o.allocate(rows)
	if !ok {
		o.finish()
		return
	}
	if o.e.epoch().Elastic {
		o.gatherRows(bytes)
		return
	}
	var tasks []*task
	var at int64
	for i, src := range o.Set.Ranks {
		piece := o.out.Data[at : at+bytes[i]]
		at += bytes[i]
		if i == me {
			copy(piece, o.Input)
			if len(o.Set.Ranks) > 1 {
				tasks = o.transfer(tasks, wire.TypePut, src, -1, o.Input)
			}
			continue
		}
		tasks = o.transfer(tasks, wire.TypeGet, src, -1, piece)
	}
	o.run(tasks, nil)
}

// wrongSizes ends an operation of which the server says that this rank brings what it does not: memory
// must not be sliced by that.
func (o *operation) wrongSizes() {
	o.fail(fmt.Errorf("%v of %q: the server's sizes are not those that rank %d sent it", o.Kind, o.name(), o.e.cfg.Rank))
	o.finish()
}

func (o *operation) counts(b []byte) []int64 {
	counts := make([]int64, len(b)/8)
	for i := range counts {
		counts[i] = int64(binary.NativeEndian.Uint64(b[8*i:]))
	}
	return counts
}

// allocate makes the output memory, once the rows of all members are known, and returns the bytes of each.
func (o *operation) allocate(rows []int64) (bytes []int64, ok bool) {
	var total int64
	row := o.rowBytes()
	bytes = make([]int64, len(rows))
	for i, r := range rows {
		wraps := row > 0 && r > limits.MaxTensor/row // then their product says nothing
		b := r * row
		if r < 0 || wraps || b < 0 || b > limits.MaxTensor || total+b > limits.MaxTensor {
			o.giveUp(fmt.Errorf("%w: %v %q of more than %d bytes", ErrMemory, o.Kind, o.name(), int64(limits.MaxTensor)))
			return nil, false
		}
		bytes[i] = b
		total += b
	}
	o.out.Rows = rows
	if total > 0 {
		o.out.Data = o.e.cfg.Alloc(int(total))
		if o.out.Data == nil {
			o.giveUp(fmt.Errorf("%w: no memory for the %d bytes of %v %q", ErrMemory, total, o.Kind, o.name()))
			return nil, false
		}
	}
	return bytes, true
}

// transfer adds the tasks that put or get data on its route from src to dst (-1: to all).
func (o *operation) transfer(tasks []*task, typ wire.Type, src, dst int, data []byte) []*task {
	step := o.e.cfg.PartitionBytes
	for part := 0; part*step < len(data); part++ {
		piece := data[part*step : min((part+1)*step, len(data))]
		t := &task{o: o, h: o.header(typ, part, o.DType), server: o.e.transferServer(src, o.d.t.ID, uint32(part))}
		t.h.Source, t.h.Destination = wire.Route(src, dst)
		if typ == wire.TypePut {
			t.in = piece
		} else {
			t.out, t.answer = piece, true
		}
		tasks = append(tasks, t)
	}
	return tasks
}
