package condition

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts runs the scripts in testdata. A script's lines are commands and comments; the
// indented lines under a command are what the machine answered. Commands:
//
//	new MODEL DATAFLOW PARKING RANK...   a fresh machine; MODEL is a setting, lead:S or some:NT
//	push RANK ITERATION [SIGNIFICANCE]   pull RANK ITERATION
//	live RANK...                         set-pull MODEL             set-push MODEL
//	missing ITERATION                    state
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		var m *Machine
		return func(words []string) []string { return command(t, &m, words[0], words[1:]) }
	})
}

// command runs one command of a script and returns the lines it answers with.
func command(t *testing.T, m **Machine, verb string, args []string) (answers []string) {
	switch verb {
	case "new":
		config, err := scriptConfig(t, args)
		if err != nil {
			return []string{"error: " + err.Error()}
		}
		made, err := New(config)
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
	in, err := scriptInput(t, verb, args)
	if err != nil {
		return []string{"error: " + err.Error()}
	}
	for _, o := range (*m).Step(in, nil) {
		answers = append(answers, o.String())
	}
	return answers
}

func scriptInput(t *testing.T, verb string, args []string) (Input, error) {
	switch verb {
	case "push":
		return Push(int(number(t, args[0])), number(t, args[1]), significance(t, args[2:])), nil
	case "pull":
		return Pull(int(number(t, args[0])), number(t, args[1])), nil
	case "live":
		return Live(ranks(t, args)), nil
	case "set-pull":
		model, err := scriptModel(t, strings.Join(args, " "))
		return SetPull(model.Pull), err
	case "set-push":
		model, err := scriptModel(t, strings.Join(args, " "))
		return SetPush(model.Push), err
	}
	t.Fatalf("unknown command %q", verb)
	return Input{}, nil
}

func scriptConfig(t *testing.T, args []string) (c Config, err error) {
	c = Config{Live: ranks(t, args[3:])}
	c.Model, err = scriptModel(t, args[0])
	c.Dataflow = map[string]Dataflow{"aggregate": Aggregate, "accumulate": Accumulate}[args[1]]
	c.Parking = map[string]Parking{"lazy": Lazy, "soft-barrier": SoftBarrier}[args[2]]
	return c, err
}

func scriptModel(t *testing.T, word string) (Model, error) {
	if s, ok := strings.CutPrefix(word, "lead:"); ok {
		return Model{Name: word, Pull: lead{number(t, s)}, Push: EveryLive{}}, nil
	}
	if nt, ok := strings.CutPrefix(word, "some:"); ok {
		return Model{Name: word, Pull: Closed{}, Push: some{int(number(t, nt))}}, nil
	}
	return Parse(word)
}

func significance(t *testing.T, words []string) float32 {
	if len(words) == 0 {
		return 0
	}
	g, err := strconv.ParseFloat(words[0], 32)
	if err != nil {
		t.Fatal(err)
	}
	return float32(g)
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
