package node

import (
	"net"
	"strings"
	"testing"

	"github.com/paceline/paceline/node/settings"
)

func TestATakenPortOfTheSchedulerInRank0NamesTheSetting(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for role, named := range map[string]bool{"worker": true, "scheduler": false} {
		s, _, err := settings.FromEnv(map[string]string{"PACELINE_ROLE": role, "PACELINE_JOB_SECRET": "a secret for this test only", "PACELINE_SCHEDULER": "127.0.0.1:1"})
		if err != nil {
			t.Fatal(err)
		}
		_, err = StartScheduler(s, l.Addr().String(), Options{})
		if err == nil || strings.Contains(err.Error(), "PACELINE_PORT") != named {
			t.Errorf("of a %s: %v", role, err)
		}
	}
}

// TestTheAddressOfASchedulerIsFreeWhenItIsClosed, also one that has not begun to accept: the next job of a process listens there.
func TestTheAddressOfASchedulerIsFreeWhenItIsClosed(t *testing.T) {
	s, _, err := settings.FromEnv(map[string]string{"PACELINE_JOB_SECRET": "a secret for this test only"})
	if err != nil {
		t.Fatal(err)
	}
	address := "127.0.7.2:0" // from which no other process's connection comes
	for range 100 {
		sched, err := StartScheduler(s, address, Options{})
		if err != nil {
			t.Fatal(err)
		}
		address = sched.Address
		if err := sched.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
