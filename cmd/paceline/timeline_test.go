package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/paceline/paceline/internal/trace"
)

// TestMergeSaysAsJSONWhatItMerged, and never into the timeline itself.
func TestMergeSaysAsJSONWhatItMerged(t *testing.T) {
	dir := t.TempDir()
	for rank, name := range []string{"a.json", "b.json"} {
		file, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		w := trace.NewWriter(file)
		for _, e := range []trace.Event{
			{Name: trace.ClockName, Phase: trace.Metadata, PID: rank, Args: map[string]any{"unix_seconds": 1700000000, "unix_us": 0, "aligned": true}},
			{Name: "grad", Phase: trace.Slice, Time: float64(rank) * 1e6, Dur: 5e5, PID: rank, TID: 1},
		} {
			if err := w.Write(&e); err != nil {
				t.Fatal(err)
			}
		}
		end := w.Close
		if rank == 1 {
			end = w.Flush // as of a rank that was killed
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		file.Close()
	}
	merge := func(args ...string) result {
		c := command(t, append([]string{"timeline", "merge"}, args...)...)
		c.Dir = dir
		return run(t, c)
	}
	check := func(text []byte, output string) {
		t.Helper()
		var m merged
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatalf("%v: %q", err, text)
		}
		if m.Output != output || m.Events != 2 || m.Seconds != 1.5 || len(m.Files) != 2 || len(m.Warnings) != 1 {
			t.Fatalf("%+v", m)
		}
		if m.Files[0] != (mergedFile{"a.json", 0, 1, false}) || m.Files[1] != (mergedFile{"b.json", 1, 1, true}) {
			t.Fatalf("%+v", m.Files)
		}
	}
	r := merge("--json", "a.json", "b.json")
	r.check(t, 0, "{", "warning: b.json: it ends early")
	check([]byte(r.stdout), "merged.json")
	r = merge("--json=summary", "-o", "-", "a.json", "b.json")
	r.check(t, 0, "[{", "warning: b.json")
	text, err := os.ReadFile(filepath.Join(dir, "summary"))
	if err != nil {
		t.Fatal(err)
	}
	check(text, "-")
	r = merge("--json", "-o", "-", "a.json", "b.json")
	r.check(t, 1, "", "--output - and --json both write to standard output: give --json=FILE")
	if r.stdout != "" {
		t.Fatalf("%+v", r)
	}
	if r = merge("a.json"); r.code != 0 || r.stdout != "" {
		t.Fatalf("%+v", r)
	}
}
