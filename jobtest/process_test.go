package jobtest_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/paceline/paceline/jobtest"
)

// The tests in this file start the nodes of a job as processes of their own (this test's binary again)
// and kill them.

func TestAKilledWorkerIsAnErrorOnEverySurvivorWithinSeconds(t *testing.T) {
	for _, servers := range []int{0, 2} {
		for killed := range 3 {
			if race && killed != servers/2 {
				continue
			}
			t.Run(fmt.Sprintf("rank %d with %d dedicated servers", killed, servers), func(t *testing.T) {
				f := jobtest.StartFleet(t, 3, servers)
				f.Workers[killed].Kill()
				f.Workers[killed] = nil
				f.Fails(5*time.Second, fmt.Sprintf("worker %d", killed))
			})
		}
	}
}

func TestAKilledServerIsAnErrorOnEveryWorkerWithinSeconds(t *testing.T) {
	f := jobtest.StartFleet(t, 3, 2)
	f.Servers[1].Kill()
	f.Fails(5*time.Second, "server ")
}

func TestAKilledSchedulerIsNotNoticed(t *testing.T) {
	f := jobtest.StartFleet(t, 3, 0)
	for range 3 {
		f.RestartScheduler()
		for range 3 { // with new tensors
			f.Steps()
		}
	}
}
