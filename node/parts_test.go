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
