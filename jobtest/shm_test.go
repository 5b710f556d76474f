package jobtest_test

import (
	"fmt"
	"testing"

	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
)

func overSharedMemory(s *settings.Settings) { s.Transport = "shm" }

// TestJobsOverSharedMemory: whole jobs, with tensors that are larger than the rings and such that travel together.
func TestJobsOverSharedMemory(t *testing.T) {
	for _, ranks := range []int{2, 4} {
		for name, servers := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2)} {
			t.Run(fmt.Sprintf("%d ranks, %s", ranks, name), func(t *testing.T) {
				j := jobtest.Start(t, ranks, jobtest.With(overSharedMemory), servers)
				for _, n := range []int{1, 1000, 3_000_000} {
					for range 3 {
						j.Works(fmt.Sprint("gradient ", n), n)
					}
				}
			})
		}
	}
}

func TestAKilledProcessOverSharedMemoryIsAnErrorOnEverySurvivor(t *testing.T) {
	for _, servers := range []int{0, 2} {
		t.Run(fmt.Sprint(servers, " dedicated servers"), func(t *testing.T) {
			f := jobtest.StartFleet(t, 3, servers, unseen, "PACELINE_TRANSPORT=shm")
			f.Workers[1].Kill()
			f.Workers[1] = nil
			f.Fails("worker 1")
		})
	}
}
