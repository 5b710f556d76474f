package agreement

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/transcript"
	"github.com/paceline/paceline/internal/units"
)

// TestTranscripts plays the scripts in testdata. A line of a script is a comment or something that happens to a
// home; the indented lines under it are what the home answers then:
//
//	new ranks=0,1,2 [warning=1s] [shutdown=10s]
//	tensor WORD name=x [generation=0] [kind=allreduce] [shape=[4]] [ranks=0,1] [set=1] [root=0] [enough=2] [coded]
//	arrive RANK TENSOR COUNT          cancel RANK TENSOR COUNT [own-will|anew]
//	undeclared TENSOR COUNT WHY...    late RANK TENSOR COUNT WHY...: its own timeout has passed
//	fail TENSOR COUNT CODE WHY...     wait DURATION: time passes, then the home looks for stalls
//	join RANK                         leave RANK [TENSOR COUNT]...: what waits for it outside the windows
//	lose RANK: in an elastic job (new … elastic)
//	reset                             state: what waits for ranks
//	longest N                         those that have waited longest
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		s := stage{t: t}
		return func(words []string) []string {
			s.said = nil
			s.act(words[0], words[1:])
			return s.said
		}
	})
}

// TestTranscriptsOfBothHalves plays the scripts in testdata/both: a home and the workers' halves, with one name and
// frames that wait until the script moves them.
//
//	ranks N             a new job
//	start RANK SHAPE    a rank begins its next operation; the arrival waits to be sent
//	send RANK [AT]      the home handles what the rank has sent, or what has overtaken that many frames of it
//	hear RANK           the rank handles what the home has told it
//	give-up RANK COUNT  by its own will
//	rest                everything that waits is moved, until nothing does; then all operations must have ended
func TestTranscriptsOfBothHalves(t *testing.T) {
	transcript.Run(t, "testdata/both/*.txt", func(t *testing.T) func(words []string) []string {
		var c *cluster
		return func(words []string) []string {
			n := func(i int) int { return (&stage{t: t}).rank(append(words, "0", "0")[i]) }
			switch words[0] {
			case "ranks":
				c = newCluster(n(1), Config{})
				c.begin(0)
			case "start":
				c.bring(c.workers[n(1)], "sum of "+words[2])
			case "send":
				c.take(c.workers[n(1)], n(2))
				c.results()
			case "hear":
				c.hear(c.workers[n(1)])
			case "give-up":
				c.giveUp(c.workers[n(1)], c.workers[n(1)].ops[n(2)], OwnWill)
			case "rest":
				for c.deliver() {
				}
				if err := c.settled(); err != nil {
					t.Error(err)
				}
			default:
				t.Fatalf("unknown command %q", words[0])
			}
			said := c.notes
			c.notes = nil
			return said
		}
	})
}

// stage is a home with what scripts call its tensors.
type stage struct {
	t       *testing.T
	h       *Home
	all     rankset.Set
	now     time.Duration
	tensors map[string]*Tensor
	said    []string
}

func (s *stage) act(verb string, args []string) {
	switch verb {
	case "new":
		s.begin(options(args))
	case "tensor":
		s.tensors[args[0]] = s.tensor(options(args[1:]))
	case "arrive":
		proceed, told := s.h.Arrive(s.tensors[args[1]], s.rank(args[0]), s.number(args[2]), s.now)
		s.say(map[bool]string{true: "proceed", false: "refuse"}[proceed])
		s.tell(told)
	case "fail":
		s.tell(s.h.Fail(s.tensors[args[0]], s.number(args[1]), s.code(args[2]), strings.Join(args[3:], " ")))
	case "undeclared":
		s.tell(s.h.Undeclared(s.tensors[args[0]], s.number(args[1]), units.FailStall, strings.Join(args[2:], " ")))
	case "late":
		s.tell(s.h.Expired(s.tensors[args[1]], s.rank(args[0]), s.number(args[2]), strings.Join(args[3:], " ")))
	case "cancel":
		why := map[string]Why{"own-will": OwnWill, "anew": Anew}[strings.Join(args[3:], "")]
		alone, told := s.h.Cancel(s.tensors[args[1]], s.rank(args[0]), s.number(args[2]), why)
		if alone {
			s.say("the others go on")
		}
		s.tell(told)
	case "join":
		all, told := s.h.Join(s.rank(args[0]))
		s.tell(told)
		if all {
			s.say("all have joined")
		}
	case "leave":
		var elsewhere []Waiting
		for i := 1; i < len(args); i += 2 {
			elsewhere = append(elsewhere, Waiting{s.tensors[args[i]], s.number(args[i+1])})
		}
		s.tell(s.h.Leave(s.rank(args[0]), elsewhere))
	case "lose":
		all, told := s.h.Lose(s.rank(args[0]))
		s.tell(told)
		if all {
			s.say("all who are left have joined")
		}
	case "wait":
		s.now += s.duration(args[0])
		slow, told := s.h.Tick(s.now)
		for _, w := range slow {
			s.say(w.String())
		}
		s.tell(told)
	case "longest":
		for _, w := range s.h.Longest(s.now, int(s.number(args[0]))) {
			s.say(fmt.Sprintf("%q has waited %v for ranks %v", w.Name, w.Waited, w.Missing))
		}
	case "reset":
		s.h.Reset()
	case "state":
		s.state()
	default:
		s.t.Fatalf("unknown command %q", verb)
	}
}

func (s *stage) begin(o map[string]string) {
	s.all = s.ranks(o["ranks"])
	s.h = NewHome(Config{All: s.all, StallWarning: s.duration(o["warning"]), StallShutdown: s.duration(o["shutdown"]), Elastic: o["elastic"] == "yes"})
	s.now, s.tensors = 0, map[string]*Tensor{}
}

func (s *stage) tensor(o map[string]string) *Tensor {
	t := &Tensor{
		ID: ID{uint32(s.number(o["set"])), o["name"]}, Generation: s.number(o["generation"]), Signature: "allreduce",
		Root: s.rank(o["root"]), Ranks: s.all, Enough: s.rank(o["enough"]), Coded: o["coded"] == "yes",
	}
	if kind := o["kind"]; kind != "" {
		t.Signature = kind
		for t.Kind.String() != kind {
			t.Kind++
		}
	}
	if shape := o["shape"]; shape != "" {
		t.Signature += " " + shape
	}
	if ranks := o["ranks"]; ranks != "" {
		t.Ranks = s.ranks(ranks)
	}
	return t
}

func (s *stage) state() {
	for _, w := range s.h.pick(func(waiting) bool { return true }) {
		s.say(fmt.Sprintf("%d of %q, generation %d: %v have come", w.count, w.id.Name, w.a.t.Generation, w.a.ranks))
	}
	s.say(fmt.Sprintf("joined %v, left %v", s.h.Joined(), s.h.Left()))
}

func (s *stage) say(text string) { s.said = append(s.said, text) }

func (s *stage) tell(told []Failure) {
	for _, f := range told {
		s.say(f.String())
	}
}

// options reads words like name=x; a word alone means yes.
func options(words []string) map[string]string {
	o := map[string]string{}
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if !ok {
			value = "yes"
		}
		o[key] = value
	}
	return o
}

func (s *stage) code(word string) units.FailureCode {
	codes := []units.FailureCode{units.FailMismatch, units.FailStall, units.FailMemory, units.FailUnsupported}
	i := slices.IndexFunc(codes, func(c units.FailureCode) bool { return c.String() == word })
	if i < 0 {
		s.t.Fatalf("no code %q", word)
	}
	return codes[i]
}

func (s *stage) ranks(word string) (ranks rankset.Set) {
	for _, w := range strings.Split(word, ",") {
		ranks.Add(s.rank(w))
	}
	return ranks
}

func (s *stage) rank(word string) int { return int(s.number(word)) }

func (s *stage) number(word string) uint64 {
	if word == "" {
		return 0
	}
	n, err := strconv.ParseUint(word, 10, 64)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *stage) duration(word string) time.Duration {
	if word == "" {
		return 0
	}
	d, err := time.ParseDuration(word)
	if err != nil {
		s.t.Fatal(err)
	}
	return d
}
