package worker

import (
	"slices"
	"sync/atomic"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// exchange is the second stage of alltoall: a piece from everybody to everybody.
func (o *operation) exchange() {
	n, me := len(o.Set.Ranks), o.e.member(&o.Op)
	all := o.counts(o.sizes) // all[i*n+j]: rows from i to j
	if !slices.Equal(all[me*n:(me+1)*n], o.splits()) {
		o.wrongSizes()
		return
	}
	rows := make([]int64, n)
	for i := range n {
		rows[i] = all[i*n+me]
	}
	bytes, ok := o.allocate(rows)
	if !ok {
		o.finish()
		return
	}
	var puts, gets []*task
	var in, out int64
	for i, peer := range o.Set.Ranks {
		send := o.Input[in : in+all[me*n+i]*o.rowBytes()]
		receive := o.out.Data[out : out+bytes[i]]
		in += int64(len(send))
		out += bytes[i]
		if i == me {
			copy(receive, send)
			continue
		}
		puts = o.transfer(puts, wire.TypePut, o.e.cfg.Rank, peer, send)
		gets = o.transfer(gets, wire.TypeGet, peer, o.e.cfg.Rank, receive)
	}
	if o.e.epoch().Elastic {
		o.exchangeTillAllHave(puts, gets)
		return
	}
	o.run(append(puts, gets...), nil)
}

// exchangeTillAllHave is exchange in an elastic job (decision 126). Puts have no answer, and are put again where their server is lost, until every rank has said, with one more
// push, that it has what it gets.
func (o *operation) exchangeTillAllHave(puts, gets []*task) {
	has := o.hasAll()
	has.later = true
	has.settled = func() {
		for _, t := range puts {
			t.happened(life.Abandon)
		}
	}
	var lacks atomic.Int64
	lacks.Store(int64(len(gets)) + 1)
	got := func() {
		if lacks.Add(-1) == 0 && !o.failed() {
			w := has.way()
			w.push(has)
			w.kick(false)
		}
	}
	for _, t := range puts {
		t.answer = true // which does not come: so it is known what is to be put again
	}
	for _, t := range gets {
		t.settled = got
	}
	o.run(slices.Concat(puts, gets, []*task{has}), nil)
	got()
}

// hasAll is the push to the last partition of an elastic job's broadcast or alltoall by which a rank says that it has all. With its answer all ranks have.
func (o *operation) hasAll() *task {
	last := len(o.d.t.Parts) - 1
	t := &task{o: o, h: o.header(wire.TypePush, last, units.Int64), server: o.d.server(last), answer: true}
	t.h.Before = o.d.had()
	t.give(nil, 0, 0)
	return t
}
