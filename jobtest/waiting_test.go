package jobtest_test

import (
	"errors"
	"fmt"
	"slices"
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
			for _, rank := range []int{0, 2} {
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
			j.Hears(heard, fmt.Sprintf("%q has waited", kind.String()+" x"), "for ranks [1 3], which have not submitted it")
			for _, rank := range []int{1, 3} { // it was only slow: all is well
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

// stall has one rank come only when the others have been given an error.
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

// TestJoinWithUnevenData has every rank bring another number of tensors, then join; the sums go on
// with those that are left, and all agree who was last. Several times in one job.
func TestJoinWithUnevenData(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2)} {
		j := jobtest.Start(t, 4, jobtest.SmallPartitions, place)
		for round := range 4 {
			steps := func(rank int) int { return 2 + (rank+round)%4*3 }
			last := make([]int, 4)
			j.Each(func(rank int) (err error) {
				for step := range steps(rank) {
					if err := sumOfUnjoined(j, rank, step, steps); err != nil {
						return err
					}
				}
				last[rank], err = j.Join(rank)
				return err
			})
			if slices.Max(last) != slices.Min(last) || steps(last[0]) != 11 {
				t.Fatalf("round %d: the ranks say that %v came last, want the one with most data", round, last)
			}
			j.Works("x", 100000)
		}
	}
}

// sumOfUnjoined sums ones: the result counts the ranks that still have data in this step.
func sumOfUnjoined(j *jobtest.Job, rank, step int, steps func(rank int) int) error {
	want := 0
	for r := range j.Workers {
		want += b2i(steps(r) > step)
	}
	for _, name := range []string{"x", ""} {
		op := jobtest.Sum(name, 100000)
		if _, err := j.Do(rank, op); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
		for i, v := range op.Output {
			if int(v) != want {
				return fmt.Errorf("step %d: element %d is %d, want %d", step, i, v, want)
			}
		}
	}
	return nil
}

func TestOperationsThatNeedAJoinedRankAreErrors(t *testing.T) {
	j := jobtest.Start(t, 3)
	for _, c := range []struct {
		kind units.Kind
		text string
	}{
		{units.Broadcast, `"x" cannot be done: its root, rank 2, has joined`},
		{units.Alltoall, `"x" cannot be done: alltoall needs every rank, and rank 2 has joined`},
	} {
		errs := j.Outcomes(func(rank int) error {
			if rank == 2 {
				_, err := j.Join(rank)
				return err
			}
			op := jobtest.Float32s(c.kind, "x", 30000)
			if c.kind == units.Broadcast {
				op.Root = 2
			}
			_, failure := j.Do(rank, op)
			if _, err := j.Join(rank); err != nil {
				return fmt.Errorf("join: %w", err)
			}
			return failure
		})
		if errs[2] != nil {
			t.Errorf("%v: the joined rank: %v", c.kind, errs[2])
		}
		for rank, err := range errs[:2] {
			if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v: rank %d: %v, want %q", c.kind, rank, err, c.text)
			}
		}
		j.Works("x", 1000)
	}
}

func TestAJoinedRankSubmitsNothing(t *testing.T) {
	j := jobtest.Start(t, 2)
	done := make(chan jobtest.Result, 1)
	if err := j.Workers[0].Engine.Join(func(out worker.Output, err error) { done <- jobtest.Result{out, err} }); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Submit(0, jobtest.Sum("x", 1)); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "this rank has joined") {
		t.Errorf("an operation of a joined rank: %v", err)
	}
	if _, err := j.Join(0); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "joined already") {
		t.Errorf("a second join: %v", err)
	}
	if _, err := j.Join(1); err != nil {
		t.Fatal(err)
	}
	if _, err := jobtest.Await(done, 0, "join"); err != nil {
		t.Fatal(err)
	}
	j.Works("x", 1)
}
