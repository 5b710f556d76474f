package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

// The root of a broadcast is done when its bytes have left and every rank is there. It may leave then,
// while servers still read what it sent and report that to it.
func TestRootMayLeaveRightAfterItsBroadcast(t *testing.T) {
	const floats = 4 << 20
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(1)} {
		for range 5 {
			j := jobtest.Start(t, 2, place, jobtest.SmallPartitions)
			j.Each(func(rank int) error {
				op := jobtest.Float32s(units.Broadcast, "last", floats)
				if rank != 0 {
					clear(op.Output)
				}
				if _, err := j.Do(rank, op); err != nil {
					return err
				}
				j.Workers[rank].Shutdown()
				j.Workers[rank] = nil
				for i, b := range op.Output {
					if b != byte([]uint32{0, 0, 0x80, 0x3f}[i%4]) {
						return fmt.Errorf("byte %d is %#x", i, b)
					}
				}
				return nil
			})
		}
	}
}

// A rank that shuts down without joining ends the joins of the others, whichever comes first; they go on
// among themselves.
func TestJoinEndsWhenAnotherRankShutsDownInstead(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2)} {
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
