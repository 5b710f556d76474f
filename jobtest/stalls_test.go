package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

func TestRanksThatDoNotComeAreNamedInAWarning(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		heard := make(chan string, 10)
		j := jobtest.Start(t, 4, network, jobtest.Stalls(50*time.Millisecond, 0), jobtest.Warnings(heard))
		for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Allgather, units.Barrier} {
			var waiting []chan jobtest.Result
			bring := func(ranks ...int) {
				for _, rank := range ranks {
					op := jobtest.Float32s(kind, kind.String()+" x", 30000)
					if kind == units.Barrier {
						op.Shape, op.Input = nil, nil
					}
					w, err := j.Submit(rank, op)
					if err != nil {
						t.Fatal(err)
					}
					waiting = append(waiting, w...)
				}
			}
			bring(0, 2)
			j.Hears(heard, fmt.Sprintf("%q has waited", kind.String()+" x"), "for ranks [1 3], which have not submitted it")
			bring(1, 3) // they were only slow: all is well
			for i, w := range waiting {
				if _, err := jobtest.Await(w, i, kind.String()); err != nil {
					t.Fatal(err)
				}
			}
			for len(heard) > 0 {
				<-heard
			}
		}
	})
}

func TestAfterTheStallTimeEveryRankGetsAnErrorTheLateOneToo(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2)} {
			j := jobtest.Start(t, 3, network, jobtest.Stalls(20*time.Millisecond, 200*time.Millisecond), jobtest.SmallPartitions, place)
			for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Alltoall, units.Reducescatter} {
				for late := range 3 {
					stall(j, kind, late)
					j.Works("x", 200000)
				}
			}
		}
	})
}

// stall has one rank come after the others have got an error.
func stall(j *jobtest.Job, kind units.Kind, late int) {
	j.T.Helper()
	given := make(chan struct{}, len(j.Workers))
	errs := j.Outcomes(func(rank int) error {
		op := jobtest.Float32s(kind, "x", 30000)
		if kind == units.Reducescatter {
			op.Output = make([]byte, 4*10000)
		}
		if rank == late {
			for range len(j.Workers) - 1 {
				<-given
			}
		}
		_, err := j.Do(rank, op)
		given <- struct{}{}
		return err
	})
	want := fmt.Sprintf(`"x" stalled: rank %d did not come within 200ms, while ranks`, late)
	for rank, err := range errs {
		if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), want) {
			j.T.Errorf("%v, rank %d: %v, want %q", kind, rank, err, want)
		}
	}
}
