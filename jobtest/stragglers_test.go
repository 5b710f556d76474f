package jobtest_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// dropping is the average over the ranks that come in time, of n float32 that are all x.
func dropping(name string, n, nt int, x float32) worker.Op {
	op := jobtest.Float32s(units.Allreduce, name, int64(n))
	op.ReduceOp, op.Sync.Model = units.Average, fmt.Sprintf("drop-stragglers:%d", nt)
	op.Input = nil
	for range n {
		op.Input = jobtest.AppendElement(op.Input, units.Float32, float64(x))
	}
	op.Output = make([]byte, len(op.Input))
	return op
}

// A push of an iteration that is closed is never added, and its rank gets the sum that the others have
// (FluentPS Table III, drop-stragglers).
func TestAStragglerGetsTheSumThatItWasDroppedFrom(t *testing.T) {
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2)} {
		t.Run(place, func(t *testing.T) {
			j := jobtest.Start(t, 3, jobtest.SmallPartitions, option)
			n := 3*jobtest.Partition/4 + 1
			for i := range 5 { // ranks 0 and 1 run ahead
				errs := make(chan error, 2)
				for rank := range 2 {
					go func() { errs <- average(j, rank, n, float32(i+rank), float64(i)+0.5) }()
				}
				for range 2 {
					if err := <-errs; err != nil {
						t.Fatal(err)
					}
				}
			}
			for i := range 5 {
				if err := average(j, 2, n, 1000, float64(i)+0.5); err != nil {
					t.Fatal(err)
				}
			}
			j.Works("beside it", 100)
		})
	}
}

func average(j *jobtest.Job, rank, n int, x float32, want float64) error {
	op := dropping("g", n, 2, x)
	if _, err := j.Do(rank, op); err != nil {
		return err
	}
	for i := 0; i < n; i++ {
		if got := jobtest.Element(units.Float32, op.Output[4*i:]); math.Abs(got-want) > 0 {
			return fmt.Errorf("element %d on rank %d is %g, want %g", i, rank, got, want)
		}
	}
	return nil
}

func TestOthersWaitForAStragglerOnceItIsAsFarBehindAsSumsAreKept(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network)
		for i := range limits.MaxKept {
			j.Each(func(rank int) error {
				if rank == 2 {
					return nil
				}
				return average(j, rank, 10, float32(i+rank), float64(i)+0.5)
			})
		}
		var waits []chan jobtest.Result
		for rank := range 2 {
			results, err := j.Submit(rank, dropping("g", 10, 2, limits.MaxKept+float32(rank)))
			if err != nil {
				t.Fatal(err)
			}
			waits = append(waits, results...)
		}
		synctest.Wait()
		for rank, w := range waits {
			if len(w) > 0 {
				t.Errorf("rank %d does not wait: %v", rank, <-w)
			}
		}
		if err := average(j, 2, 10, 1000, 0.5); err != nil {
			t.Fatal(err)
		}
		for rank, w := range waits {
			if _, err := jobtest.Await(w, rank, "g"); err != nil {
				t.Fatal(err)
			}
		}
		for i := range limits.MaxKept {
			if err := average(j, 2, 10, 1000, float64(i)+1.5); err != nil {
				t.Fatal(err)
			}
		}
		j.Works("beside it", 100)
	})
}

// A straggler that never comes holds the others up once it is as far behind: they hear which rank it is.
func TestAStragglerThatNeverComesIsNamed(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 3, network, jobtest.Stalls(time.Second, 5*time.Second))
		for i := range limits.MaxKept + 1 {
			j.Each(func(rank int) error {
				if rank == 2 {
					return nil
				}
				err := average(j, rank, 10, float32(i+rank), float64(i)+0.5)
				if i < limits.MaxKept {
					return err
				}
				if text := fmt.Sprint(err); !strings.Contains(text, "stalled: rank 2 did not come within 5s") {
					return fmt.Errorf("rank %d, which waits for rank 2: %s", rank, text)
				}
				return nil
			})
		}
	})
}

// A push counts as a whole or not at all, also where the iteration closes while it arrives.
func TestASumUnderDropStragglersIsThatOfWholePushes(t *testing.T) {
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
		t.Run(place, func(t *testing.T) {
			j := jobtest.Start(t, 3, jobtest.SmallPartitions, option)
			for _, n := range []int{1, 3 * jobtest.Partition / 4} {
				j.Each(func(rank int) error { return averageOfWholePushes(j, rank, n) })
			}
			j.Works("beside it", 100)
		})
	}
}

// averageOfWholePushes has ranks average powers of two, from which the contributors of an average follow.
func averageOfWholePushes(j *jobtest.Job, rank, n int) error {
	for range 100 {
		op := dropping(fmt.Sprint("race ", n), n, 2, float32(int(1)<<rank))
		if _, err := j.Do(rank, op); err != nil {
			return err
		}
		for at := 0; at < n; at += jobtest.Partition / 4 { // partitions may be closed with different ranks
			first := jobtest.Element(units.Float32, op.Output[4*at:])
			if math.Abs(first-7./3) > 1e-6 && first != 1.5 && first != 2.5 && first != 3 {
				return fmt.Errorf("an average of %g, which is none of whole pushes", first)
			}
			for i := at; i < min(at+jobtest.Partition/4, n); i++ {
				if got := jobtest.Element(units.Float32, op.Output[4*i:]); got != first {
					return fmt.Errorf("elements %d and %d of one partition are of different pushes: %g and %g", at, i, first, got)
				}
			}
		}
	}
	return nil
}
