package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/paceline/paceline/cmd/paceline/bench"
)

func TestBenchBarrierPrintsOrWritesJSON(t *testing.T) {
	file := filepath.Join(t.TempDir(), "barrier.json")
	for _, flag := range []string{"--json", "--json=" + file} {
		var out strings.Builder
		c := benchBarrierCommand()
		c.SetOut(&out)
		c.SetArgs([]string{"--np", "10", "--predictions", "15", "--searches", "2", "--inputs", "1", flag})
		if err := c.Execute(); err != nil {
			t.Fatal(err)
		}
		text := []byte(out.String())
		if flag != "--json" {
			if !strings.Contains(out.String(), "least waiting time") {
				t.Errorf("%s prints\n%s", flag, out.String())
			}
			text, _ = os.ReadFile(file)
		}
		var r bench.BarrierReport
		if err := json.Unmarshal(text, &r); err != nil || r.Workers != 10 || r.Median <= 0 || len(r.Waits) != 10 {
			t.Errorf("%s: %+v, %v", flag, r, err)
		}
	}
}

func TestBenchBarrierSaysWhatIsAllowed(t *testing.T) {
	for _, args := range [][]string{{"--workers", "0"}, {"--predictions", "10001"}, {"--workers", "100000", "--predictions", "201"}, {"--inputs", "-1"}} {
		c := benchBarrierCommand()
		c.SilenceUsage, c.SilenceErrors = true, true
		c.SetArgs(args)
		if err := c.Execute(); err == nil || !strings.Contains(err.Error(), "allowed") {
			t.Errorf("%v: %v", args, err)
		}
	}
}
