package server

import (
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// A change of conditions is for what ranks go on to use: a tensor of the name that was given up counts other iterations.
func TestAChangeOfConditionsLeavesOutWhatWasGivenUp(t *testing.T) {
	const n = 16
	b := newBench(t, 1<<20, false)
	push := func(id uint32, iterations uint64) {
		for i := range iterations {
			for rank := range 3 {
				b.send(rank, wire.Header{Type: wire.TypePush, Tensor: id, DType: units.Float32, Iteration: i, Seq: i}, ones(n))
			}
			for rank := range 3 {
				if h, payload := b.receive(rank); h.Type != wire.TypeResult {
					t.Fatalf("%v %s", h.Type, payload)
				}
			}
		}
	}
	first := declared(1, "w", units.Allreduce, units.Sum, units.Float32, 4*n)
	again := first
	again.ID, again.Generation = 2, 1
	b.announce(first)
	push(1, 5)
	b.send(0, wire.Header{Type: wire.TypeCancel, Tensor: 1, Iteration: 5, Seq: 5}, nil)
	b.announce(again)
	push(2, 1)
	reply := b.s.round.condition(&wire.Condition{Names: []string{"w"}, Try: true, Pull: "bsp"})
	if reply.Error != "" || reply.Keys != 1 || reply.Pushed != 1 {
		t.Errorf("%+v, want 1 key with 1 iteration", reply)
	}
}
