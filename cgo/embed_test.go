package main

import (
	"net"
	"testing"
	"time"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
)

// TestTheSchedulerOfAProcessServesJobsThatDiffer: one with another peer timeout gets another scheduler, at the same address.
func TestTheSchedulerOfAProcessServesJobsThatDiffer(t *testing.T) {
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_JOB_SECRET": "a secret for this test only"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if process.scheduler != nil {
			process.scheduler.Close()
		}
		process.scheduler, process.embedded = nil, nil
	})
	free, err := net.Listen("tcp", "127.0.7.1:0") // from which no other process's connection comes
	if err != nil {
		t.Fatal(err)
	}
	s.EmbedScheduler = free.Addr().String()
	free.Close()
	embedded := func() *node.Scheduler {
		t.Helper()
		if err := embed(s); err != nil {
			t.Fatal(err)
		}
		return process.scheduler
	}
	first := embedded()
	s.NumServers, s.Placement = 2, "uniform"
	if embedded() != first {
		t.Error("a job with dedicated servers and a placement gets another scheduler")
	}
	s.PeerTimeout = 2 * time.Minute
	second := embedded()
	if second == first {
		t.Error("a job with another peer timeout has the scheduler of the one before")
	}
	s.JobSecret = []byte("another secret for this test") // such as one that is derived for another kind of servers
	if embedded() == second {
		t.Error("a job with another secret has the scheduler of the one before")
	}
}
