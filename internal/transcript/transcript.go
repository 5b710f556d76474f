// Package transcript plays scripts to a machine under test and compares what it says with what the scripts have.
package transcript

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata with what the machine says now")

// Run runs each file that matches a pattern as a test. A line of a script is a comment behind "# ", or a command in
// words: begin makes a fresh machine, and what that says to a command are the indented lines below it.
func Run(t *testing.T, pattern string, begin func(*testing.T) func(words []string) (said []string)) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := play(string(want), begin(t))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			compare(t, file, strings.Split(got, "\n"), strings.Split(string(want), "\n"))
		})
	}
}

func play(script string, act func(words []string) []string) string {
	var text strings.Builder
	for line := range strings.Lines(script) {
		if strings.HasPrefix(line, "  ") {
			continue // what it said before
		}
		text.WriteString(line)
		if words := strings.Fields(line); len(words) > 0 && !strings.HasPrefix(words[0], "#") {
			for _, said := range act(words) {
				text.WriteString("  " + said + "\n")
			}
		}
	}
	return text.String()
}

// compare shows the first line that differs.
func compare(t *testing.T, file string, got, want []string) {
	t.Helper()
	at := func(lines []string, i int) string {
		if i < len(lines) {
			return lines[i]
		}
		return "the end"
	}
	for i := range max(len(got), len(want)) {
		if at(got, i) != at(want, i) {
			t.Fatalf("%s:%d\n got: %s\nwant: %s\n(go test -update writes the new transcript)", file, i+1, at(got, i), at(want, i))
		}
	}
}
