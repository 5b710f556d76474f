package jobtest_test

import (
	"fmt"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
)

// The root of a broadcast is done when its bytes have left and every rank is there. It may leave then,
// while servers still read its bytes and report their consumption.
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
