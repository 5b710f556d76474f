package jobtest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/worker"
)

// The root of a broadcast is done when its bytes have left and every rank is there. It may leave then,
// while servers still read what it sent and report that to it.
func TestRootMayLeaveRightAfterItsBroadcast(t *testing.T) {
	const floats = 4 << 20
	for _, place := range []jobOption{func(*job) {}, dedicated(1)} {
		for range 5 {
			j := startJob(t, 2, place, smallPartitions)
			j.each(func(rank int) error {
				op := float32s(units.Broadcast, "last", floats)
				if rank != 0 {
					clear(op.Output)
				}
				if _, err := j.do(rank, op); err != nil {
					return err
				}
				j.workers[rank].Shutdown()
				j.workers[rank] = nil
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
	for _, place := range []jobOption{func(*job) {}, dedicated(2)} {
		for _, late := range []bool{false, true} {
			j := startJob(t, 3, place, smallPartitions)
			j.works("x", 1000)
			pair := j.addSet([]int{0, 1})
			left := make(chan struct{})
			errs := j.outcomes(func(rank int) error {
				if rank == 2 {
					go func() { defer close(left); j.workers[2].Engine.Shutdown(t.Context()) }()
					return nil
				}
				if late {
					<-left
				}
				_, err := j.join(rank)
				return err
			})
			for rank, err := range errs[:2] {
				if !errors.Is(err, worker.ErrUnsupported) || !strings.Contains(err.Error(), "rank 2 has shut down") {
					t.Errorf("late %v: rank %d: %v, want it to name rank 2", late, rank, err)
				}
			}
			<-left
			others := &job{t: t, workers: j.workers[:2]}
			others.each(func(rank int) error {
				op := sum("beside", 200000)
				op.Set = pair
				_, err := others.do(rank, op)
				return err
			})
		}
	}
}
