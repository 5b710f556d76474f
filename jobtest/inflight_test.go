package jobtest_test

import (
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// Several operations of one name and kind are in flight when the memory of a server is not enough for
// the first: its iterations and the later ones' are given up, so each of them has to end.
func TestMemoryLimitEndsEveryOperationInFlightUnderTheName(t *testing.T) {
	for range 5 {
		j := jobtest.Start(t, 2, jobtest.Dedicated(2), jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.ServerMemory = 1 << 20 }))
		errs := j.Outcomes(func(rank int) error {
			var ops []worker.Op
			for range 6 {
				ops = append(ops, jobtest.Float32s(units.Allreduce, "", 400<<10))
			}
			results, err := j.Submit(rank, ops...)
			if err != nil {
				return err
			}
			for _, r := range results {
				if _, err = jobtest.Await(r, rank, "unnamed"); err != nil && strings.Contains(err.Error(), "hangs") {
					return err
				}
			}
			return nil
		})
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
		j.WorksAgain("", 100000)
	}
}
