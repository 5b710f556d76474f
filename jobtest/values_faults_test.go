package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// A push for which the server has no memory ends on its rank alone, whatever the others are at, and when that
// rank has left they go on.
func TestTheServersMemoryLimitEndsOneRanksUseOfAHeldValue(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		const mega = 1 << 20
		j := jobtest.Start(t, 3, network, jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) { s.PartitionBytes, s.ServerMemory = mega, 7*mega/2 }))
		values := make([]*jobtest.Held, 3)
		j.Each(func(rank int) (err error) {
			values[rank], err = j.Declare(rank, "w", "ssp:0", mega/4)
			return err
		})
		parked := waits(t, j, values[0])
		synctest.Wait() // its push has arrived, and all that was to be sent is
		for range 5 {   // so that this rank has used the value more often than the one that waits
			if err := values[1].Use(units.ReadNow, 0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := j.Submit(2, jobtest.Sum("hog", mega)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the hog is there
		err := values[1].Use(units.Add|units.ReadNow, 1)
		if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
			t.Fatalf("%v, want the memory limit", err)
		}
		<-j.Leave(1)
		synctest.Wait() // by then the server has let go what the rank was to be sent, and the hog
		if err := values[2].Use(units.Add, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := jobtest.Await(parked, 0, "w"); err != nil {
			t.Fatal(err)
		}
	})
}

// Of a declaration that has failed nothing stays, on no server.
func TestAFailedDeclarationLeavesNoMemory(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network, jobtest.Dedicated(2), jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.ServerMemory = 8 * jobtest.Partition }))
		for i := range 20 {
			for rank, err := range j.Outcomes(func(rank int) error {
				_, err := j.Declare(rank, "w", fmt.Sprintf("ssp:%d", i+rank), 3*jobtest.Partition/4)
				return err
			}) {
				if !errors.Is(err, worker.ErrMismatch) {
					t.Fatalf("attempt %d, rank %d: %v", i, rank, err)
				}
			}
		}
		j.Each(func(rank int) error {
			_, err := j.Declare(rank, "w", "ssp:100", 3*jobtest.Partition/4)
			return err
		})
	})
}

// Operations that begin while their round ends must end too, on the in-process way as on others.
func TestALossEndsUsesOfHeldValuesThatAreJustBeginning(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{Latency: 50 * time.Microsecond, Bandwidth: 1 << 30}, func(t *testing.T, network jobtest.Option) {
		for round := range 15 {
			j := jobtest.Start(t, 2, network, jobtest.SmallPartitions)
			n := 40 * jobtest.Partition / 4
			values := make([]*jobtest.Held, 2)
			j.Each(func(rank int) (err error) {
				values[rank], err = j.Declare(rank, "w", "ssp:0", n)
				return err
			})
			results, err := j.Submit(0, values[0].Op(units.Add|units.Read, 1))
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(round) * 100 * time.Microsecond) // the round ends earlier or later in the operation
			go j.Workers[0].Engine.Shutdown(t.Context())
			if _, err := jobtest.Await(results[0], 0, "w"); err == nil || strings.Contains(err.Error(), "hangs") {
				t.Fatalf("round %d: %v", round, err)
			}
			j.Shutdown()
		}
	})
}

// The server of a rank outside a process set stays for the values of the set too.
func TestAServerStaysForTheValuesOfASetThatItsRankIsNotIn(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.SmallPartitions)
		sets := make([]wire.ProcessSet, 3)
		j.Each(func(rank int) (err error) {
			sets[rank], err = j.Workers[rank].Control.AddSet(t.Context(), []int{0, 1})
			return err
		})
		use := func(rank int, how units.Use) error {
			v := j.Held(rank, "w", "ssp:1", 6*jobtest.Partition/4)
			op := v.Op(how, 1)
			op.Set = sets[rank]
			_, err := j.Do(rank, op)
			return err
		}
		both := func(how units.Use) {
			t.Helper()
			j.Each(func(rank int) error {
				if rank == 2 {
					return nil
				}
				return use(rank, how)
			})
		}
		both(units.Declare)
		select {
		case <-j.Leave(2):
			t.Fatal("the server is gone")
		case <-time.After(11 * time.Second):
		}
		both(units.Add | units.Read)
	})
}
