package server

import (
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/transport/wire"
)

// The report of a loss says of which round it is: a dedicated server's may reach the scheduler when the next one has begun.
func TestALossIsReportedOfItsRound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, 1<<20, false)
		var reported wire.Lost
		b.s.cfg.OnLost = func(l wire.Lost) { reported = l }
		b.conns[1].Close()
		synctest.Wait()
		if reported.Role != wire.RoleWorker || reported.Rank != 1 || reported.Round != 7 {
			t.Errorf("the server reports %+v, want worker 1 of round 7", reported)
		}
	})
}
