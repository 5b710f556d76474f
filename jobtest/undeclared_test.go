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
	"github.com/paceline/paceline/worker"
)

var everyPlace = []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.Both(1), jobtest.Pairs(2)}

// TestARankWhoseDeclarationIsRefusedFailsTheOperationOnAllRanks has one rank declare what the scheduler refuses, before or behind the others.
// Every rank gets the reason at once, and the name works again afterwards.
func TestARankWhoseDeclarationIsRefusedFailsTheOperationOnAllRanks(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, place := range everyPlace {
			j := jobtest.Start(t, 3, network, place)
			for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Allgather, units.Reducescatter} {
				for odd := range 3 {
					for _, late := range []bool{false, true} {
						refused(j, kind, odd, late)
					}
				}
			}
		}
	})
}

func refused(j *jobtest.Job, kind units.Kind, odd int, late bool) {
	j.T.Helper()
	name := kind.String() + " x"
	bring := func(rank int) worker.Op {
		op := jobtest.Float32s(kind, name, 30000)
		if kind == units.Reducescatter {
			op.Output = make([]byte, 4*10000)
		}
		if rank == odd {
			op.Set = j.All()
			op.Set.Ranks = append(op.Set.Ranks, 3) // a process set that the job does not have
			if kind == units.Reducescatter {
				op.Output = make([]byte, 4*7500)
			}
		}
		return op
	}
	began := time.Now()
	for rank, err := range j.Outcomes(func(rank int) error {
		if late == (rank == odd) {
			time.Sleep(time.Second)
		}
		_, err := j.Do(rank, bring(rank))
		return err
	}) {
		if err == nil || !says(err.Error(), fmt.Sprintf("%q could not be declared on rank %d", name, odd), "process set 0 has ranks") {
			j.T.Fatalf("rank %d: %v, want what was refused on rank %d", rank, err, odd)
		}
	}
	if took := time.Since(began); took > 2*time.Second {
		j.T.Errorf("took %v", took)
	}
	j.Works(name, 30000)
}

// TestARankWhoseDeclarationTimesOutFailsTheOperationOnAllRanks cuts one rank off the scheduler alone.
func TestARankWhoseDeclarationTimesOutFailsTheOperationOnAllRanks(t *testing.T) {
	for _, place := range everyPlace {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, _ jobtest.Option) {
			j, heal := awayFromScheduler(t, place, 5*time.Second)
			for rank, err := range j.Outcomes(func(rank int) error {
				_, err := j.Do(rank, jobtest.Sum("x", 3*jobtest.Partition))
				return err
			}) {
				if !errors.Is(err, worker.ErrStall) || !says(err.Error(), `"x" could not be declared on rank 1`) {
					t.Errorf("rank %d: %v, want that rank 1 could not declare it", rank, err)
				}
			}
			heal()
			j.Works("x", 3*jobtest.Partition)
		})
	}
}

// TestAnOperationsOwnTimeoutEndsItBeforeItIsDeclared: with an error at once on the rank that waits for the scheduler, and on the others.
func TestAnOperationsOwnTimeoutEndsItBeforeItIsDeclared(t *testing.T) {
	for _, place := range everyPlace {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, _ jobtest.Option) {
			j, heal := awayFromScheduler(t, place, 20*time.Second)
			began := time.Now()
			for rank, err := range j.Outcomes(func(rank int) error {
				op := jobtest.Sum("x", 3*jobtest.Partition)
				if rank == 1 {
					op.Timeout = 2 * time.Second
				}
				_, err := j.Do(rank, op)
				return err
			}) {
				if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), `allreduce of "x" on rank 1 has waited 2s`) {
					t.Errorf("rank %d: %v, want rank 1's timeout", rank, err)
				}
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("took %v", took)
			}
			heal()
			j.Works("x", 3*jobtest.Partition)
		})
	}
}

// TestAnOperationsOwnTimeoutEndsItBehindOneThatWaits: on every rank, where a rank has one of them under way at a time, too. The one before it
// ends as well, with the last rank.
func TestAnOperationsOwnTimeoutEndsItBehindOneThatWaits(t *testing.T) {
	for _, place := range append(everyPlace, jobtest.Elastic) {
		for late := 1; late < 3; late++ {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 3, network, place, jobtest.SmallPartitions)
				ended := make(chan struct{})
				for rank, err := range j.Outcomes(func(rank int) error {
					first, second := jobtest.Sum("", 3*jobtest.Partition), jobtest.Sum("", 3*jobtest.Partition)
					switch rank {
					case 0:
						second.Timeout = 2 * time.Second
					case late:
						<-ended
					}
					results, err := j.Submit(rank, first, second)
					if err != nil {
						return err
					}
					_, err = jobtest.Await(results[1], rank, "the second")
					if rank == 0 {
						close(ended)
					}
					if _, err := jobtest.Await(results[0], rank, "the first"); err != nil && strings.Contains(err.Error(), "hangs") {
						return err
					}
					return err
				}) {
					if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), `on rank 0 has waited 2s for its end, its timeout`) {
						t.Errorf("rank %d: %v, want rank 0's timeout", rank, err)
					}
				}
				j.Works("", 1000)
			})
		}
	}
}

// TestAValueThatOneRankCannotDeclareIsDeclaredAgain: no rank goes on with a value that another one has not.
func TestAValueThatOneRankCannotDeclareIsDeclaredAgain(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, place := range everyPlace {
			j := jobtest.Start(t, 3, network, place)
			for odd := range 3 {
				for rank, err := range j.Outcomes(func(rank int) error {
					op := j.Held(rank, "v", "ssp:1", 1000).Op(units.Declare, 1)
					if rank == odd {
						op.Set = j.All()
						op.Set.Ranks = append(op.Set.Ranks, 3)
					}
					_, err := j.Do(rank, op)
					return err
				}) {
					if err == nil || !says(err.Error(), fmt.Sprintf(`"v" could not be declared on rank %d`, odd)) {
						t.Fatalf("rank %d: %v, want what was refused on rank %d", rank, err, odd)
					}
				}
			}
			j.Each(func(rank int) error {
				_, err := j.Declare(rank, "v", "ssp:1", 1000)
				return err
			})
		}
	})
}

// TestOperationsBehindOneThatIsNotDeclaredFailWithIt has several of one name in flight.
func TestOperationsBehindOneThatIsNotDeclaredFailWithIt(t *testing.T) {
	for _, place := range append(everyPlace, jobtest.Elastic) {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, _ jobtest.Option) {
			j, heal := awayFromScheduler(t, place, 5*time.Second)
			for rank, err := range j.Outcomes(func(rank int) error {
				results, err := j.Submit(rank, jobtest.Sum("", 1000), jobtest.Sum("", 2000), jobtest.Sum("", 1000))
				if err != nil {
					return err
				}
				for i, r := range results {
					switch _, err := jobtest.Await(r, rank, ""); {
					case err == nil || strings.Contains(err.Error(), "hangs"):
						return fmt.Errorf("operation %d: %w, want an error", i, err)
					case i == 0 && !strings.Contains(err.Error(), "could not be declared on rank 1"):
						return fmt.Errorf("%w, want that rank 1 could not declare it", err)
					}
				}
				return nil
			}) {
				if err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
			heal()
			j.Works("", 1000)
		})
	}
}

// awayFromScheduler starts a job in which rank 1 is cut off the scheduler alone, until heal.
func awayFromScheduler(t *testing.T, place jobtest.Option, declares time.Duration) (j *jobtest.Job, heal func()) {
	const patience = time.Hour
	network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: patience})
	t.Cleanup(network.Close)
	j = jobtest.Start(t, 3, place, jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.StartTimeout, s.PeerTimeout = declares, patience }), eachOn(network))
	script := func(line string) {
		if err := network.Script(line); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
	}
	script("at 0s worker1<->servers freeze")
	return j, func() { script("at 0s worker1<->servers thaw") }
}
