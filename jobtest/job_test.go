package jobtest_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
)

// TestMain also is the main function of the processes that the tests of dying ones start (process_test.go).
func TestMain(m *testing.M) {
	jobtest.ActAsProcess()
	goleak.VerifyTestMain(m)
}

func TestTheSizeOfPartitionsFollowsTheServersWhereNoSettingSaysIt(t *testing.T) {
	unset := jobtest.With(func(s *settings.Settings) { s.PartitionBytes = 0 })
	for _, c := range []struct {
		name string
		job  *jobtest.Job
		want int64
	}{
		{"embedded servers", jobtest.Start(t, 1, unset), 4 << 20},
		{"dedicated servers", jobtest.Start(t, 1, unset, jobtest.Dedicated(1)), 256 << 10},
		{"a setting", jobtest.Start(t, 1, jobtest.SmallPartitions, jobtest.Dedicated(1)), jobtest.Partition},
	} {
		if got := c.job.Workers[0].Settings.PartitionBytes; got != c.want {
			t.Errorf("%s: %d bytes, want %d", c.name, got, c.want)
		}
	}
}
