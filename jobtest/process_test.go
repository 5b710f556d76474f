package jobtest_test

import (
	"fmt"
	"testing"

	"github.com/paceline/paceline/jobtest"
)

// The tests in this file start the nodes of a job as processes of their own (this test's binary again)
// and kill them.

// unseen is a peer timeout that no test reaches: it is the end of the connection that tells of a loss, however crowded the machine.
const unseen = "PACELINE_PEER_TIMEOUT=1h"

func TestAKilledWorkerIsAnErrorOnEverySurvivor(t *testing.T) {
	for _, servers := range []int{0, 2} {
		for killed := range 3 {
			if race && killed != servers/2 {
				continue
			}
			t.Run(fmt.Sprintf("rank %d with %d dedicated servers", killed, servers), func(t *testing.T) {
				f := jobtest.StartFleet(t, 3, servers, unseen)
				f.Workers[killed].Kill()
				f.Workers[killed] = nil
				f.Fails(fmt.Sprintf("worker %d", killed))
			})
		}
	}
}

func TestAKilledRankWithTheSchedulerIsAnErrorOnEverySurvivor(t *testing.T) {
	f := jobtest.StartFleetOfWorkers(t, 3, unseen)
	f.Workers[0].Kill()
	f.Workers[0] = nil
	f.Fails("worker 0")
}

// TestAKilledRepresentativeIsAnErrorOnEverySurvivor kills a rank that pushes sums of its host: its neighbour and the other host's
// ranks hear of it alike.
func TestAKilledRepresentativeIsAnErrorOnEverySurvivor(t *testing.T) {
	for killed := range 4 - 3*b2i(race) {
		f := jobtest.StartFleet(t, 4, 1, jobtest.InPairs, unseen)
		f.Workers[killed].Kill()
		f.Workers[killed] = nil
		f.Fails(fmt.Sprintf("worker %d", killed))
	}
}

func TestAKilledServerIsAnErrorOnEveryWorker(t *testing.T) {
	f := jobtest.StartFleet(t, 3, 2, unseen)
	f.Servers[1].Kill()
	f.Fails("server ")
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
