package superstep_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts runs the scripts in testdata: a decider and its workers, whose frames arrive in order and at once,
// but for those of a rank that is held. A script's lines are commands and comments; the indented lines under a
// command are what the machines did. Times are in ms. Commands:
//
//	new MODEL RANK...           end TIME RANK [OCCUPANCY]     an iteration ends; the next begins when the verdict is there
//	live RANK...                excuse RANK                   hold RANK    deliver RANK
//	pause TIME RANK             an iteration begins only now  late TIME RANK
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		c := &cast{t: t}
		return func(words []string) []string {
			c.said = nil
			c.command(words[0], words[1:])
			return c.said
		}
	})
}

// cast is the machines of a script and the frames that are held.
type cast struct {
	t       *testing.T
	said    []string
	now     time.Duration
	model   condition.Model
	decider *superstep.Decider
	workers map[int]*superstep.Worker
	held    map[int][]func()
}

func (c *cast) say(format string, args ...any) { c.said = append(c.said, fmt.Sprintf(format, args...)) }

func (c *cast) number(word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

func (c *cast) command(verb string, args []string) {
	var numbers []int
	if verb != "new" {
		for _, a := range args[:min(2, len(args))] {
			numbers = append(numbers, c.number(a))
		}
	}
	switch verb {
	case "end", "late", "pause":
		c.now = time.Duration(numbers[0]) * time.Millisecond
		numbers = numbers[1:]
	}
	switch verb {
	case "new":
		c.begin(args)
	case "end":
		occupancy := 0.0
		if len(args) > 2 {
			occupancy, _ = strconv.ParseFloat(args[2], 64)
		}
		c.end(numbers[0], occupancy)
	case "pause":
		c.workers[numbers[0]].Begin(c.now)
	case "late":
		again, late := c.workers[numbers[0]].Late(c.now)
		c.say("late %t, again in %v", late, again)
	case "excuse":
		report := c.workers[numbers[0]].Excuse()
		c.report(report)
	case "live":
		c.join(c.ranks(args))
		c.tell(c.decider.Live(c.ranks(args)))
	case "hold":
		c.held[numbers[0]] = []func(){}
	case "deliver":
		frames := c.held[numbers[0]]
		delete(c.held, numbers[0])
		for _, f := range frames {
			f()
		}
	default:
		c.t.Fatalf("unknown command %q", verb)
	}
}

func (c *cast) ranks(words []string) (s rankset.Set) {
	for _, w := range words {
		s.Add(c.number(w))
	}
	return s
}

func (c *cast) begin(args []string) {
	model, err := condition.Parse(args[0])
	if err != nil {
		c.t.Fatal(err)
	}
	live := c.ranks(args[1:])
	c.now, c.model, c.decider = 0, model, superstep.NewDecider(model.Supersteps, live)
	c.workers, c.held = map[int]*superstep.Worker{}, map[int][]func(){}
	c.join(live)
}

// join makes the workers of ranks that come.
func (c *cast) join(live rankset.Set) {
	for _, rank := range live.Ranks() {
		if c.workers[rank] == nil {
			c.workers[rank] = superstep.NewWorker(c.model.Supersteps, rank)
			c.workers[rank].Begin(c.now)
		}
	}
}

// end ends an iteration of a rank.
func (c *cast) end(rank int, occupancy float64) {
	w := c.workers[rank]
	number, iteration := w.Superstep(), w.Iterations()+1
	report, verdict := w.End(c.now)
	report.Occupancy = occupancy
	c.say("rank %d: superstep %d iteration %d in %v: %v", rank, number, iteration, report.Interval, verdict)
	if verdict != superstep.Asked {
		w.Begin(c.now)
	}
	c.report(report)
}

// frame carries something from or to a rank, now or when it is delivered.
func (c *cast) frame(rank int, arrive func()) {
	if frames, held := c.held[rank]; held {
		c.held[rank] = append(frames, arrive)
		return
	}
	arrive()
}

func (c *cast) report(r superstep.Report) {
	c.frame(r.Rank, func() { c.tell(c.decider.Hear(r, c.now)) })
}

func (c *cast) tell(out superstep.Outputs) {
	if out.From != out.To {
		c.say("decider: thresholds from %v to %v", out.From, out.To)
	}
	if out.Advanced {
		c.say("decider: superstep %d begins", out.Superstep)
	}
	for _, s := range slices.Clone(out.Stops) {
		if s.Iteration == 0 {
			c.say("decider: rank %d goes on in superstep %d", s.Rank, s.Superstep)
		} else {
			c.say("decider: superstep %d ends with rank %d's iteration %d", s.Superstep, s.Rank, s.Iteration)
		}
		c.frame(s.Rank, func() {
			if verdict := c.workers[s.Rank].Stop(s, c.now); verdict != superstep.None {
				c.say("rank %d: %v", s.Rank, verdict)
				c.workers[s.Rank].Begin(c.now)
			}
		})
	}
}
