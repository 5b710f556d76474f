package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// Several operations of one name and kind are in flight when a server has too little memory for the first: its iteration
// and the later ones are given up, and each operation ends.
func TestMemoryLimitEndsEveryOperationInFlightUnderTheName(t *testing.T) {
	for range 5 {
		j := jobtest.Start(t, 2, jobtest.Dedicated(2), jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.ServerMemory = 1 << 20 }))
		errs := j.Outcomes(func(rank int) error {
			var ops []worker.Op
			for range 6 {
				ops = append(ops, jobtest.Float32s(units.Allreduce, "", 400<<10))
			}
			results, err := j.Submit(rank, ops...)
			if err != nil {
				return err
			}
			for _, r := range results {
				if _, err = jobtest.Await(r, rank, "unnamed"); err != nil && strings.Contains(err.Error(), "hangs") {
					return err
				}
			}
			return nil
		})
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
		j.WorksAgain("", 100000)
	}
}

func TestServerMemoryLimitIsAnErrorOnEveryRank(t *testing.T) {
	for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Allgather} {
		t.Run(kind.String(), func(t *testing.T) {
			// One partition is more than the server's memory, whatever the speed of readers.
			j := jobtest.Start(t, 3, jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) { s.ServerMemory = 1 << 20 }))
			for range 3 {
				errs := j.Outcomes(func(rank int) error {
					_, err := j.Do(rank, jobtest.Float32s(kind, "x", 1<<20))
					return err
				})
				for rank, err := range errs {
					if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), `"x" failed: the server's memory limit is reached`) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
						t.Errorf("rank %d: %v, want the server's memory limit", rank, err)
					}
				}
				j.WorksAgain("x", 100000)
			}
		})
	}
}

// A push for which the server has no memory fails on its rank alone. When that rank has left, the others go on.
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
		synctest.Wait() // its push has arrived, and all answers are sent
		for range 5 {   // this rank uses the value more often than the one that waits
			if err := values[1].Use(units.ReadNow, 0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := j.Submit(2, jobtest.Sum("hog", mega)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the large tensor has arrived
		err := values[1].Use(units.Add|units.ReadNow, 1)
		if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
			t.Fatalf("%v, want the memory limit", err)
		}
		<-j.Leave(1)
		synctest.Wait() // the server has released the rank's answers and the large tensor
		if err := values[2].Use(units.Add, 1); err != nil {
			t.Fatal(err)
		}
		if _, err := jobtest.Await(parked, 0, "w"); err != nil {
			t.Fatal(err)
		}
	})
}

// A failed declaration leaves nothing on any server.
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

func TestTheServersMemoryLimitEndsACodedSum(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.Dedicated(1), jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.ServerMemory = 4 * jobtest.Partition }))
	for rank, err := range j.Outcomes(func(rank int) error {
		_, err := j.Do(rank, gradient("w", "threshold:1e-9", units.Float32, jobtest.Normal(20*jobtest.Partition/4, 1)))
		return err
	}) {
		if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
			t.Errorf("rank %d: %v, want the memory limit", rank, err)
		}
	}
}
