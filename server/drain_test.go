package server

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// TestADrainEndsUnderSteadyTraffic: a rank begins to bring something each time before what another one brings is there, so that there is no moment at which nobody is served.
func TestADrainEndsUnderSteadyTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, 1<<20, false)
		rows := declared(1, "rows", units.Allgather, units.Sum, units.Uint8, 24)
		rows.Ranks = []int{0, 1, 2}
		b.announce(rows)
		half := make([]byte, 12)
		begin := func(i int) {
			frame := wire.AppendFrame(nil, wire.Header{Type: wire.TypePut, Tensor: 1, Rank: uint16(i % 2), Source: uint16(i % 2), Destination: wire.EveryRank, Iteration: uint64(i)}, make([]byte, 24))
			_ = b.conns[i%2].Send(net.Buffers{frame[:len(frame)-len(half)]})
		}
		end := func(i int) { _ = b.conns[i%2].Send(net.Buffers{half}) }
		begin(0)
		synctest.Wait()
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			b.s.Drain()
		}()
		synctest.Wait()
		for i := range emptyWithin + 100 {
			begin(i + 1)
			synctest.Wait()
			end(i)
			time.Sleep(emptyEvery) // of virtual time: the server looks
			synctest.Wait()
		}
		select {
		case <-drained:
		default:
			t.Error("it does not end")
		}
		end(emptyWithin + 100)
		if h, _ := b.receive(2); h.Type != wire.TypeBye {
			t.Errorf("the ranks hear %v, want a goodbye", h.Type)
		}
		<-drained
	})
}
