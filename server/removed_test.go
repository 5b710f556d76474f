package server

import (
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// With a process set go all its tensors, whatever is in flight, and all their memory. A rank that has not heard of it yet may
// go on for a while: nobody answers, and nothing is kept. Other sets do not notice.
func TestARemovedSetLeavesNothingOnTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, 1<<20, false)
		const n = 1000
		of := func(set uint32, t wire.Tensor) wire.Tensor {
			t.ProcessSet, t.Ranks = set, []int{0, 1, 2}
			return t
		}
		others := of(0, declared(1, "x", units.Allreduce, units.Sum, units.Float32, 4*n))
		b.announce(others)
		sums := func(iteration uint64) {
			for rank := range 3 {
				b.send(rank, wire.Header{Type: wire.TypePush, Flags: wire.FlagHome, Tensor: 1, DType: units.Float32, Iteration: iteration, Seq: iteration}, ones(n))
			}
			for rank := range 3 {
				if h, payload := b.receive(rank); h.Type != wire.TypeResult || h.Tensor != 1 {
					t.Fatalf("rank %d: %v %s", rank, h.Type, payload)
				}
			}
		}
		sums(0)
		synctest.Wait()
		lent := b.s.pool.Lent()

		sum, values := of(4, declared(2, "x", units.Allreduce, units.Sum, units.Float32, 4*n)), of(4, under("ssp:1", declared(3, "w", units.Accumulate, units.Sum, units.Float32, 4*n)))
		rows := of(4, declared(5, "rows", units.Allgather, units.Sum, units.Uint8, 24))
		for _, tensor := range []wire.Tensor{sum, values, rows} {
			b.announce(tensor)
		}
		b.hold(3, n, 0)
		half := func(tensor uint32) {
			b.send(0, wire.Header{Type: wire.TypePush, Flags: wire.FlagHome, Tensor: tensor, DType: units.Float32}, ones(n))
		}
		put := func() {
			b.send(1, wire.Header{Type: wire.TypePut, Tensor: 5, Source: 1, Destination: wire.EveryRank}, make([]byte, 24))
		}
		half(2)
		put()
		synctest.Wait()
		if b.s.pool.Lent() <= lent {
			t.Fatal("the set's tensors take no memory")
		}
		b.s.RemoveSet(wire.RemovedSet{Round: 6, ID: 4})
		if b.s.pool.Lent() <= lent {
			t.Fatal("a set of another round was removed")
		}

		b.s.RemoveSet(wire.RemovedSet{Round: 7, ID: 4})
		late := of(4, declared(6, "late", units.Allreduce, units.Sum, units.Float32, 4*n))
		b.announce(late)
		half(2)
		half(3)
		half(6)
		put()
		b.send(1, wire.Header{Type: wire.TypeGet, Tensor: 5, Source: 0, Destination: 1}, nil)
		b.send(0, wire.Header{Type: wire.TypeReport, Tensor: 3, Flags: wire.FlagEmpty}, nil)
		b.send(0, wire.Header{Type: wire.TypeCancel, Tensor: 2}, nil)
		synctest.Wait()
		r := b.s.running()
		if got := b.s.pool.Lent(); got != lent || len(r.tensors) != 1 || r.names.home.Waiting() != 0 {
			t.Errorf("%d bytes are in use, want %d; %d tensors and %d operations are left", got, lent, len(r.tensors), r.names.home.Waiting())
		}
		sums(1)
	})
}
