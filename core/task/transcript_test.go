package task

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata with what the machine does now")

// TestTranscripts runs the scripts in testdata. A script's lines are commands and comments; the indented line under
// a command is where the task is then, and behind an arrow what the caller has to do. Commands:
//
//	new [answered] [retained]     a fresh task
//	EVENT...                      by their names, one after the other
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := transcript(t, string(want))
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != string(want) {
				t.Errorf("%s: the machine now answers\n%s", file, got)
			}
		})
	}
}

func transcript(t *testing.T, script string) string {
	var text strings.Builder
	var s State
	for line := range strings.Lines(script) {
		if strings.HasPrefix(line, "  ") {
			continue // an earlier answer
		}
		text.WriteString(line)
		words := strings.Fields(line)
		if len(words) == 0 || words[0] == "#" {
			continue
		}
		if words[0] == "new" {
			s = New(mode(t, words[1:]))
			fmt.Fprintf(&text, "  %v\n", s)
			continue
		}
		for _, word := range words {
			e := slices.Index(names[:], word)
			if e < 0 {
				t.Fatalf("unknown event %q", word)
			}
			var out Effects
			s, out = s.Step(Event(e))
			fmt.Fprintf(&text, "  %v", s)
			if out != 0 {
				fmt.Fprintf(&text, " -> %v", out)
			}
			text.WriteByte('\n')
		}
	}
	return text.String()
}

func mode(t *testing.T, words []string) (m Mode) {
	for _, word := range words {
		switch word {
		case "answered":
			m |= Answered
		case "retained":
			m |= Retained
		default:
			t.Fatalf("unknown mode %q", word)
		}
	}
	return m
}
