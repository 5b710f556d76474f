package jobtest_test

import (
	"context"
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

// A process set is removed while a rank of it waits for another in operations of every way: they end with an error that says
// so, later ones are refused, and the same ranks have a new set with the same names.
func TestARemovedProcessSetEndsItsOperations(t *testing.T) {
	for name, place := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "pairs": jobtest.Pairs(2)} {
		t.Run(name, func(t *testing.T) {
			j := jobtest.Start(t, 3, place, jobtest.SmallPartitions)
			set := j.AddSet([]int{0, 1})
			sum := func(name string) worker.Op {
				return worker.Op{
					Kind: units.Allreduce, ReduceOp: units.Sum, DType: units.Uint8, Set: set, Shape: []int64{300_000}, Name: name,
					Input: make([]byte, 300_000), Output: make([]byte, 300_000),
				}
			}
			gather := sum("rows")
			gather.Kind, gather.Output = units.Allgather, nil
			waiting, err := j.Submit(0, sum("half"), sum(""), sum(""), gather)
			if err != nil {
				t.Fatal(err)
			}
			j.Each(func(rank int) error {
				ctx, cancel := context.WithTimeout(t.Context(), jobtest.Hang)
				defer cancel()
				return j.Workers[rank].RemoveSet(ctx, set.ID)
			})
			for _, done := range waiting {
				if _, err := jobtest.Await(done, 0, "half"); !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), "process set 1 [0 1] was removed while it was in flight") {
					t.Errorf("ended with %v, want the removal", err)
				}
			}
			if _, err := j.Do(1, sum("half")); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "process set 1 was removed") {
				t.Errorf("later: %v, want a refusal", err)
			}
			set = j.AddSet([]int{0, 1})
			j.First(2).Each(func(rank int) error {
				_, err := j.Do(rank, sum("half"))
				return err
			})
			j.Works("all", 1000)
		})
	}
}

// Sets come and go, each with a value that takes a quarter of a server's memory: removal gives it back.
func TestARemovedProcessSetGivesItsMemoryBack(t *testing.T) {
	const bytes = 1 << 20
	for name, place := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(1)} {
		t.Run(name, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 2, network, place, jobtest.With(func(s *settings.Settings) { s.ServerMemory = 4 * bytes }))
				for i := range 12 {
					set := j.AddSet([]int{1})
					op := j.Held(1, fmt.Sprint("w", i), "ssp:1", bytes/4).Op(units.Declare, 1)
					op.Set, op.Root, op.Input = set, 1, make([]byte, bytes)
					if _, err := j.Do(1, op); err != nil {
						t.Fatalf("set %d: %v", i, err)
					}
					j.Each(func(rank int) error { return j.Workers[rank].RemoveSet(t.Context(), set.ID) })
					synctest.Wait()
				}
			})
		})
	}
}
