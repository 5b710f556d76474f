package jobtest_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// TestJoinWithUnevenData gives every rank another number of tensors, after which it joins. Sums go on among the remaining
// ranks, and all agree on the last one. Several times in one job.
func TestJoinWithUnevenData(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.Pairs(2)} {
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
	for _, kind := range []units.Kind{units.Broadcast, units.Alltoall, units.Allgather, units.Reducescatter} {
		for _, name := range []string{"x", ""} {
			t.Run(fmt.Sprintf("%v %q", kind, name), func(t *testing.T) { needsAJoinedRank(t, j, kind, name) })
		}
	}
}

// needsAJoinedRank has rank 2 join while the others bring an operation, before it or after. They go on with sums.
func needsAJoinedRank(t *testing.T, j *jobtest.Job, kind units.Kind, name string) {
	text := fmt.Sprintf("cannot be done: %v needs every rank, and rank 2 has joined", kind)
	errs := j.Outcomes(func(rank int) error {
		if rank == 2 {
			_, err := j.Join(rank)
			return err
		}
		op := jobtest.Float32s(kind, name, 30000)
		if kind == units.Reducescatter {
			op.Output = make([]byte, len(op.Input)/3)
		}
		_, failure := j.Do(rank, op)
		sum := jobtest.Sum("beside", 1000)
		if _, err := j.Do(rank, sum); err != nil || sum.Output[0] != 2 {
			return fmt.Errorf("a sum afterwards: %v, %w", sum.Output[0], err)
		}
		if _, err := j.Join(rank); err != nil {
			return fmt.Errorf("join: %w", err)
		}
		return failure
	})
	if errs[2] != nil {
		t.Errorf("the joined rank: %v", errs[2])
	}
	for rank, err := range errs[:2] {
		if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), text) {
			t.Errorf("rank %d: %v, want %q", rank, err, text)
		}
	}
	j.Works("x", 1000)
}

// A reducescatter ends on a rank that has no rows when its own are sent.
func TestARankMayJoinWhenItsReducescatterHasEnded(t *testing.T) {
	j := jobtest.Start(t, 3)
	joined := make(chan struct{})
	j.Each(func(rank int) error {
		if rank != 2 {
			<-joined
		}
		op := jobtest.Float32s(units.Reducescatter, "rows", 20_000)
		op.Shape, op.Output = []int64{2, 10_000}, make([]byte, len(op.Input)/2)
		if rank == 2 {
			op.Output = nil
		}
		if _, err := j.Do(rank, op); err != nil {
			return err
		}
		if rank == 2 {
			time.AfterFunc(200*time.Millisecond, func() { close(joined) }) // when the servers know of the join
		}
		_, err := j.Join(rank)
		return err
	})
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

// A rank that shuts down without joining fails the joins of the others, before or after it; they go on among
// themselves.
func TestJoinEndsWhenAnotherRankShutsDownInstead(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.Pairs(2)} {
		for _, late := range []bool{false, true} {
			j := jobtest.Start(t, 3, place, jobtest.SmallPartitions)
			j.Works("x", 1000)
			pair := j.AddSet([]int{0, 1})
			left := make(chan struct{})
			errs := j.Outcomes(func(rank int) error {
				if rank == 2 {
					go func() { defer close(left); j.Workers[2].Engine.Shutdown(t.Context()) }()
					return nil
				}
				if late {
					<-left
				}
				_, err := j.Join(rank)
				return err
			})
			for rank, err := range errs[:2] {
				if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), "rank 2 has shut down") {
					t.Errorf("late %v: rank %d: %v, want it to name rank 2", late, rank, err)
				}
			}
			<-left
			others := j.First(2)
			others.Each(func(rank int) error {
				op := jobtest.Sum("beside", 200000)
				op.Set = pair
				_, err := others.Do(rank, op)
				return err
			})
		}
	}
}

// TestARankIsToldOfASumThatWasMadeWithoutIt: a rank joins, another of its process set sums without it, and its join fails then, because a
// third one shuts down instead. What it brings to that sum afterwards is an error on it, and the next sum is of both again.
func TestARankIsToldOfASumThatWasMadeWithoutIt(t *testing.T) {
	for name, place := range map[string]jobtest.Option{"dedicated": jobtest.Dedicated(2), "summed by host": jobtest.Pairs(2)} {
		for _, wide := range []int{10, 200000} {
			t.Run(fmt.Sprint(name, " ", wide), func(t *testing.T) {
				jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
					j := jobtest.Start(t, 3, place, network, jobtest.SmallPartitions)
					j.Works("x", wide)
					set := j.AddSet([]int{0, 1})
					j.Works("y", 1)
					joined := make(chan error, 1)
					if err := j.Workers[1].Engine.Join(func(_ worker.Output, err error) { joined <- err }); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					sum := func(rank int) (float32, error) {
						op := jobtest.Sum("of two", wide)
						op.Set = set
						_, err := j.Do(rank, op)
						return float32(op.Output[0]), err
					}
					if got, err := sum(0); err != nil || got != 1 {
						t.Fatalf("the sum without the joined rank: %v, %v, want 1", got, err)
					}
					j.Leave(2)
					if err := <-joined; !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), "rank 2 has shut down") {
						t.Fatalf("the join: %v", err)
					}
					if _, err := sum(1); !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), "summed without that rank") {
						t.Fatalf("the rank that was left out: %v", err)
					}
					synctest.Wait() // the other has heard of it, too
					others := j.First(2)
					others.Each(func(rank int) error {
						if got, err := sum(rank); err != nil || got != 2 {
							return fmt.Errorf("the next sum: %v, %w, want 2", got, err)
						}
						return nil
					})
				})
			})
		}
	}
}
