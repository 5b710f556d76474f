package jobtest_test

import (
	"bytes"
	"errors"
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
				if ones := jobtest.Float32s(units.Broadcast, "", floats).Input; !bytes.Equal(op.Output, ones) {
					return errors.New("it has other bytes")
				}
				return nil
			})
		}
	}
}
