package task

import (
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts runs the scripts in testdata. A script's lines are commands and comments; the indented line under
// a command is where the task is then, and behind an arrow what the caller has to do. Commands:
//
//	new [answered] [retained]     a fresh task
//	EVENT...                      by their names, one after the other
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		var s State
		return func(words []string) (said []string) {
			if words[0] == "new" {
				s = New(mode(t, words[1:]))
				return []string{s.String()}
			}
			for _, word := range words {
				e := slices.Index(names[:], word)
				if e < 0 {
					t.Fatalf("unknown event %q", word)
				}
				var out Effects
				s, out = s.Step(Event(e))
				is := s.String()
				if out != 0 {
					is += " -> " + out.String()
				}
				said = append(said, is)
			}
			return said
		}
	})
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
