package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/paceline/paceline/sim"
)

func TestSimPrintsOrWritesJSONAndDraws(t *testing.T) {
	file, plot := filepath.Join(t.TempDir(), "sim.json"), filepath.Join(t.TempDir(), "sim.svg")
	for _, flag := range []string{"--json", "--json=" + file} {
		var out strings.Builder
		c := simCommand()
		c.SetOut(&out)
		c.SetArgs([]string{"--workers", "4", "--iterations", "5", "--model", "bsp ssp:1", "--model", "expression:lead < 2 || count[V] > 1",
			"--parking", "lazy,soft-barrier", "--plot", plot, flag})
		if err := c.Execute(); err != nil {
			t.Fatal(err)
		}
		text := []byte(out.String())
		if flag != "--json" {
			if !strings.Contains(out.String(), "iterations/s") {
				t.Errorf("%s prints\n%s", flag, out.String())
			}
			text, _ = os.ReadFile(file)
		}
		var results []sim.Result
		if err := json.Unmarshal(text, &results); err != nil || len(results) != 6 || results[5].Seconds <= 0 {
			t.Errorf("%s: %+v, %v", flag, results, err)
		}
	}
	if svg, err := os.ReadFile(plot); err != nil || !strings.Contains(string(svg), "ssp:1, soft-barrier") {
		t.Errorf("plot: %v\n%s", err, svg)
	}
}

func TestSimSaysWhatIsAllowed(t *testing.T) {
	for want, args := range map[string][]string{
		"allowed are whole numbers from 1 to 10000":                                          {"--workers", "0"},
		`--until "some": allowed are all and total`:                                          {"--until", "some"},
		`--parking "soft": allowed are lazy and soft-barrier`:                                {"--parking", "lazy,soft"},
		`--barrier "none": allowed are overlap and global`:                                   {"--barrier", "none"},
		`--compute: unknown compute time "gauss:1s", allowed are`:                            {"--compute", "gauss:1s"},
		`--model: unknown synchronisation model "sps:3", did you mean "ssp"? Known are: bsp`: {"--model", "sps:3"},
		`S is "-1", allowed is a whole number`:                                               {"--model", "ssp:-1"},
		`C is "1.5", allowed is a number from 0 to 1`:                                        {"--model", "pssp:3,1.5"},
		"waits for 9 workers of 4: allowed is from 1 to 4":                                   {"--model", "drop-stragglers:9", "--workers", "4"},
		`--bytes "4MM": a size is a number`:                                                  {"--bytes", "4MM"},
		`--bandwidth: bandwidth is "10", allowed is`:                                         {"--bandwidth", "10"},
		`--server-bandwidth: bandwidth is "x", allowed is`:                                   {"--server-bandwidth", "x"},
		"--model: missing": {"--model", " "},
	} {
		c := simCommand()
		c.SilenceUsage, c.SilenceErrors = true, true
		c.SetArgs(args)
		if err := c.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q, got %v", args, want, err)
		}
	}
}
