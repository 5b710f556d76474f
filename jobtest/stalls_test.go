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

func TestTensorsThatWaitForTheSameRanksAreOneWarning(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		heard := make(chan string, 100)
		j := jobtest.Start(t, 2, network, jobtest.Stalls(50*time.Millisecond, 0), jobtest.Warnings(heard))
		var ops [2][]worker.Op
		for i := range 40 {
			for rank := range ops {
				ops[rank] = append(ops[rank], jobtest.Sum(fmt.Sprint("tensor ", i), 1000))
			}
		}
		early, err := j.Submit(0, ops[0]...)
		if err != nil {
			t.Fatal(err)
		}
		j.Hears(heard, "and 39 more have waited", "for ranks [1], which have not submitted them")
		late, err := j.Submit(1, ops[1]...)
		if err != nil {
			t.Fatal(err)
		}
		for i := range early {
			for rank, done := range [][]chan jobtest.Result{early, late} {
				if _, err := jobtest.Await(done[i], rank, ops[0][i].Name); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

func TestAfterTheStallTimeEveryRankGetsAnErrorTheLateOneToo(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.Pairs(2)} {
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

func TestARankBoundsItsOwnWaitWhereTheServersCheckNoStalls(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		heard := make(chan string, 100)
		j := jobtest.New(t, 3, network, jobtest.Dedicated(2), jobtest.Stalls(0, 0), jobtest.SmallPartitions, jobtest.Warnings(heard))
		jobtest.Stalls(time.Second, 5*time.Second)(j) // of the ranks alone
		j.Start()
		for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Alltoall, units.Reducescatter} {
			for late := range 3 {
				began := time.Now()
				for rank, err := range outcomes(j, kind, late) {
					switch {
					case !errors.Is(err, worker.ErrStall) && !errors.Is(err, worker.ErrUnsupported):
						t.Errorf("%v, rank %d: %v, want a stall", kind, rank, err)
					case errors.Is(err, worker.ErrStall) && !says(err.Error(), `"x" stalled`, fmt.Sprintf("%v on rank %d", kind, rank), "server", "5s"):
						t.Errorf("%v, rank %d: %v", kind, rank, err)
					case errors.Is(err, worker.ErrUnsupported) && !says(err.Error(), `"x" was given up by rank`):
						t.Errorf("%v, rank %d: %v", kind, rank, err)
					}
				}
				if took := time.Since(began); took > 30*time.Second {
					t.Errorf("%v: ended after %v", kind, took)
				}
				j.Works("x", 200000)
			}
		}
		j.Hears(heard, `"x" has waited`, "server", "which has not answered")
		errs := j.Outcomes(func(rank int) error { // a held value that only one rank pushes to
			v, err := j.Declare(rank, "v", "", 1)
			if err == nil && rank == 0 {
				err = v.Use(units.Add|units.Read, 1)
			}
			return err
		})
		if err := errs[0]; !errors.Is(err, worker.ErrStall) || !says(err.Error(), `"v" stalled`, "on rank 0") {
			t.Errorf("a read that nobody answers: %v", err)
		}
	})
}

// What may rightly take hours has no deadline: a join, and the end of a rank whose server others need. Each says once that it waits.
func TestARankThatWaitsForOthersToJoinOrToShutDownSaysSo(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Elastic} {
			heard := make(chan string, 100)
			j := jobtest.Start(t, 3, network, place, jobtest.Stalls(4*time.Second, 0), jobtest.Warnings(heard))
			j.Each(func(rank int) error {
				time.Sleep(time.Duration(rank) * 2500 * time.Millisecond) // the last joins 5 s behind the first
				_, err := j.Join(rank)
				return err
			})
			hearsOnce(t, heard, "rank 0 has joined, and has waited 4 s for the other ranks to join")
			j.Each(func(rank int) error {
				_, err := j.Declare(rank, "v", "asp", 1)
				return err
			})
			var left []<-chan struct{}
			for rank := range 3 {
				left = append(left, j.Leave(rank))
				time.Sleep(2500 * time.Millisecond)
			}
			for _, l := range left {
				<-l
			}
			hearsOnce(t, heard, "rank 0 has shut down, and its server stays for ranks [2], which have not")
		}
	})
}

// hearsOnce checks that one warning has come, and nothing else.
func hearsOnce(t *testing.T, heard <-chan string, want string) {
	t.Helper()
	for range len(heard) {
		line := <-heard
		if line != want {
			t.Errorf("heard %q, want %q", line, want)
		}
		want = "no more"
	}
	if want != "no more" {
		t.Errorf("did not hear %q", want)
	}
}

// says reports whether a text has all of these in it.
func says(text string, all ...string) bool {
	return !slices.ContainsFunc(all, func(part string) bool { return !strings.Contains(text, part) })
}

// stall has one rank come after the others have got an error.
func stall(j *jobtest.Job, kind units.Kind, late int) {
	j.T.Helper()
	want := fmt.Sprintf(`"x" stalled: rank %d did not come within 200ms, while ranks`, late)
	for rank, err := range outcomes(j, kind, late) {
		if !errors.Is(err, worker.ErrStall) || !strings.Contains(err.Error(), want) {
			j.T.Errorf("%v, rank %d: %v, want %q", kind, rank, err, want)
		}
	}
}

// outcomes are the ends of one operation to which a rank comes after the others have got theirs, and the servers know.
func outcomes(j *jobtest.Job, kind units.Kind, late int) []error {
	given := make(chan struct{}, len(j.Workers))
	return j.Outcomes(func(rank int) error {
		op := jobtest.Float32s(kind, "x", 30000)
		if kind == units.Reducescatter {
			op.Output = make([]byte, 4*10000)
		}
		if rank == late {
			for range len(j.Workers) - 1 {
				<-given
			}
			time.Sleep(time.Second)
		}
		_, err := j.Do(rank, op)
		given <- struct{}{}
		return err
	})
}

// TestATimeoutNamesTheRanksThatDidNotCome on every rank, the late ones too, wherever the home of the name is.
func TestATimeoutNamesTheRanksThatDidNotCome(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		for what, place := range map[string]jobtest.Option{
			"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "pairs": jobtest.Pairs(2), "elastic": jobtest.Elastic,
		} {
			j := jobtest.Start(t, 4, network, jobtest.SmallPartitions, place)
			for name, late := range map[string][]int{"ranks 1, 3": {1, 3}, "rank 0": {0}} {
				for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Alltoall, units.Reducescatter} {
					began := time.Now()
					for rank, err := range j.Outcomes(func(rank int) error {
						op := jobtest.Float32s(kind, "x", 30000)
						op.Timeout = time.Second
						if kind == units.Reducescatter {
							op.Output = make([]byte, 4*7500)
						}
						if slices.Contains(late, rank) {
							time.Sleep(2 * time.Second)
						}
						_, err := j.Do(rank, op)
						return err
					}) {
						if !errors.Is(err, worker.ErrStall) || !says(err.Error(), fmt.Sprintf(`%v of "x" on rank `, kind), "has waited 1s for its end, its timeout: "+name+" did not come") {
							t.Errorf("%s: %v without %s: rank %d: %v", what, kind, name, rank, err)
						}
					}
					if took := time.Since(began); took > 2100*time.Millisecond {
						t.Errorf("%s: %v ended after %v", what, kind, took)
					}
					j.Works("x", 200000)
				}
			}
		}
	})
}
