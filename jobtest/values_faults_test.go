package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// A push for which the server has no memory ends on its rank alone, whatever the others are at, and when that
// rank has left they go on.
func TestTheServersMemoryLimitEndsOneRanksUseOfAHeldValue(t *testing.T) {
	virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
		const mega = 1 << 20
		j := startJob(t, 3, network, dedicated(1), with(func(s *settings.Settings) { s.PartitionBytes, s.ServerMemory = mega, 7*mega/2 }))
		values := make([]*held, 3)
		j.each(func(rank int) (err error) {
			values[rank], err = j.value(rank, "w", "ssp:0", mega/4)
			return err
		})
		parked := waits(t, j, values[0])
		synctest.Wait() // its push has arrived, and all that was to be sent is
		for range 5 {   // so that this rank has used the value more often than the one that waits
			if err := values[1].use(units.ReadNow, 0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := j.submit(2, sum("hog", mega)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the hog is there
		err := values[1].use(units.Add|units.ReadNow, 1)
		if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
			t.Fatalf("%v, want the memory limit", err)
		}
		j.leave(1)
		j.leaving.Wait()
		synctest.Wait() // by then the server has let go what the rank was to be sent, and the hog
		if err := values[2].use(units.Add, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := await(parked, 0, "w"); err != nil {
			t.Fatal(err)
		}
	})
}

// Of a declaration that has failed nothing stays, on no server.
func TestAFailedDeclarationLeavesNoMemory(t *testing.T) {
	virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
		j := startJob(t, 2, network, dedicated(2), smallPartitions, with(func(s *settings.Settings) { s.ServerMemory = 8 * partition }))
		for i := range 20 {
			for rank, err := range j.outcomes(func(rank int) error {
				_, err := j.value(rank, "w", fmt.Sprintf("ssp:%d", i+rank), 3*partition/4)
				return err
			}) {
				if !errors.Is(err, worker.ErrMismatch) {
					t.Fatalf("attempt %d, rank %d: %v", i, rank, err)
				}
			}
		}
		j.each(func(rank int) error {
			_, err := j.value(rank, "w", "ssp:100", 3*partition/4)
			return err
		})
	})
}

// Operations that begin while their round ends must end too, on the in-process way as on others.
func TestALossEndsUsesOfHeldValuesThatAreJustBeginning(t *testing.T) {
	virtually(t, transporttest.Options{Latency: 50 * time.Microsecond, Bandwidth: 1 << 30}, func(t *testing.T, network jobOption) {
		for round := range 15 {
			j := startJob(t, 2, network, smallPartitions)
			n := 40 * partition / 4
			values := make([]*held, 2)
			j.each(func(rank int) (err error) {
				values[rank], err = j.value(rank, "w", "ssp:0", n)
				return err
			})
			results, err := j.submit(0, values[0].op(units.Add|units.Read, 1))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(round) * 100 * time.Microsecond) // the round ends earlier or later in the operation
			go j.workers[0].Engine.Shutdown(t.Context())
			if _, err := await(results[0], 0, "w"); err == nil || strings.Contains(err.Error(), "hangs") {
				t.Fatalf("round %d: %v", round, err)
			}
			j.shutdown()
		}
	})
}

// The server of a rank outside a process set stays for the values of the set too.
func TestAServerStaysForTheValuesOfASetThatItsRankIsNotIn(t *testing.T) {
	virtually(t, transporttest.Options{}, func(t *testing.T, network jobOption) {
		j := startJob(t, 3, network, smallPartitions)
		sets := make([]wire.ProcessSet, 3)
		j.each(func(rank int) (err error) {
			sets[rank], err = j.workers[rank].Control.AddSet(t.Context(), []int{0, 1})
			return err
		})
		use := func(rank int, how units.Use) error {
			v := &held{j: j, rank: rank, name: "w", sync: "ssp:1", now: make([]float32, 6*partition/4)}
			op := v.op(how, 1)
			op.Set = sets[rank]
			_, err := j.do(rank, op)
			return err
		}
		both := func(how units.Use) {
			t.Helper()
			j.each(func(rank int) error {
				if rank == 2 {
					return nil
				}
				return use(rank, how)
			})
		}
		both(units.Declare)
		left := make(chan struct{})
		w := j.workers[2]
		j.workers[2] = nil
		j.leaving.Go(func() { w.Shutdown(); close(left) })
		select {
		case <-left:
			t.Fatal("the server is gone")
		case <-time.After(11 * time.Second):
		}
		both(units.Add | units.Read)
	})
}
