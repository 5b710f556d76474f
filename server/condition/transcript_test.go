package condition

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/rankset"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata with what the machine does now")

// TestTranscripts runs the scripts in testdata. A script's lines are commands and comments; the
// indented lines under a command are what the machine answered. Commands:
//
//	new MODEL DATAFLOW PARKING RANK...   a fresh machine; MODEL is bsp, lead:S or some:NT
//	push RANK ITERATION                  pull RANK ITERATION
//	live RANK...                         set-pull closed|lead:S     set-push every|some:NT
//	missing ITERATION                    state
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
	var m *Machine
	for line := range strings.Lines(script) {
		if strings.HasPrefix(line, "  ") {
			continue // an earlier answer
		}
		text.WriteString(line)
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		for _, answer := range command(t, &m, words[0], words[1:]) {
			fmt.Fprintf(&text, "  %s\n", answer)
		}
	}
	return text.String()
}

// command runs one command of a script and returns the lines it answers with.
func command(t *testing.T, m **Machine, verb string, args []string) (answers []string) {
	switch verb {
	case "new":
		made, err := New(scriptConfig(t, args))
		if err != nil {
			return []string{"error: " + err.Error()}
		}
		*m = made
		return nil
	case "missing":
		return []string{(*m).Missing(number(t, args[0])).String()}
	case "state":
		v := (*m).view(-1, 0)
		return []string{fmt.Sprintf("V %d, live %v, parked %d, fastest %d, slowest %d", v.V, (*m).Live(), (*m).Parked(), v.Fastest, v.Slowest)}
	}
	for _, o := range (*m).Step(scriptInput(t, verb, args), nil) {
		answers = append(answers, o.String())
	}
	return answers
}

func scriptInput(t *testing.T, verb string, args []string) Input {
	switch verb {
	case "push":
		return Push(int(number(t, args[0])), number(t, args[1]), 0)
	case "pull":
		return Pull(int(number(t, args[0])), number(t, args[1]))
	case "live":
		return Live(ranks(t, args))
	case "set-pull":
		return SetPull(scriptPull(t, args[0]))
	case "set-push":
		return SetPush(scriptPush(t, args[0]))
	}
	t.Fatalf("unknown command %q", verb)
	return Input{}
}

func scriptConfig(t *testing.T, args []string) Config {
	c := Config{Live: ranks(t, args[3:])}
	switch name, _, _ := strings.Cut(args[0], ":"); name {
	case "lead":
		c.Model = Model{Name: args[0], Pull: scriptPull(t, args[0]), Push: EveryLive{}}
	case "some":
		c.Model = Model{Name: args[0], Pull: Closed{}, Push: scriptPush(t, args[0])}
	default:
		model, err := Parse(args[0])
		if err != nil {
			t.Fatal(err)
		}
		c.Model = model
	}
	c.Dataflow = map[string]Dataflow{"aggregate": Aggregate, "accumulate": Accumulate}[args[1]]
	c.Parking = map[string]Parking{"lazy": Lazy, "soft-barrier": SoftBarrier}[args[2]]
	return c
}

func scriptPull(t *testing.T, word string) PullCondition {
	if s, ok := strings.CutPrefix(word, "lead:"); ok {
		return lead{number(t, s)}
	}
	return Closed{}
}

func scriptPush(t *testing.T, word string) PushCondition {
	if s, ok := strings.CutPrefix(word, "some:"); ok {
		return some{int(number(t, s))}
	}
	return EveryLive{}
}

func ranks(t *testing.T, words []string) rankset.Set {
	var s rankset.Set
	for _, w := range words {
		s.Add(int(number(t, w)))
	}
	return s
}

func number(t *testing.T, word string) uint64 {
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// lead and some are conditions as a user would write them.

// lead lets a worker be fewer than s iterations beyond what is closed.
type lead struct{ s uint64 }

func (c lead) Holds(v View) bool { return v.Progress < v.V+c.s }
func (c lead) Ahead() bool       { return c.s > 0 }
func (c lead) String() string    { return fmt.Sprintf("i < V + %d", c.s) }

// some closes an iteration when nt ranks, or all that live, have pushed it.
type some struct{ nt int }

func (c some) Holds(v View) bool { return v.Count(v.V) >= min(c.nt, v.N) }
func (c some) String() string    { return fmt.Sprintf("count[V] >= %d", c.nt) }
