package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/transcript"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// TestScripts runs testdata/*.txt on the machine. A line of a script is an input; the indented lines below it are the
// machine's outputs:
//
//	wait 1s                            time passes
//	restart                            a new scheduler, without knowledge; launched=3: it knows of so many workers; beside=1: their launcher is on their host; peer-timeout=10s: its own
//	advance 2                          the launcher goes on to its round 2
//	w0 register worker 0 of=2 …        w0's line opens and it registers; of, dedicated, server, placement, elastic, launcher, timeout, version, pid, session
//	                              sync: its PACELINE_SYNC
//	s0 register server host:port       a dedicated server
//	w0 back                            the client of w0 reconnects with what it knows; more=1: with the first part of it; silent=host:port: where the scheduler fell silent
//	w0 declare conv/4,4 fc/8#1         tensors: name/bytes of partitions#generation; set=1; broadcast.x is a broadcast
//	w0 measures 0=100 1=10             so many MB/s from and to each server
//	w0 add 0,1 at=0; w0 remove 1 at=1  calls on process sets
//	w0 register worker 0 … standby=host:port; w0 answers; w0 ended: a probe says so
//	o0 drain 1; s0 drain; s0 drain empty=1
//	w0 forgets; w0 poses as w1         the roster it had; with what w1 knows
//	w0 lost worker 1 why; w0 farewell; w0 bye; w0 breaks; w0 breaks silent; w0 status; w0 status detail; w0 report 3; w0 hello role
func TestScripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		s := newStage()
		return func(words []string) []string {
			s.said = nil
			if err := s.act(words); err != nil {
				t.Fatalf("%q: %v", words, err)
			}
			return s.said
		}
	})
}

// stage holds the machine and its actors.
type stage struct {
	machine  *Machine
	now      time.Duration
	restarts uint64
	lastLine Line
	lastID   uint64
	actors   map[string]*actor
	byLine   map[Line]*actor
	said     []string
}

// actor is a node, with the memory of its client.
type actor struct {
	name     string
	line     Line
	register wire.Register
	known    wire.Known
	asked    map[uint64][]wire.Tensor
	query    uint64 // the latest question
}

func newStage() *stage {
	s := &stage{actors: map[string]*actor{}, byLine: map[Line]*actor{}}
	s.restart(Settings{})
	return s
}

func (s *stage) restart(settings Settings) {
	s.restarts++
	settings.FirstRound, settings.Grace = 100*s.restarts, time.Second
	s.machine = NewMachine(settings)
	s.byLine = map[Line]*actor{}
	for _, a := range s.actors {
		a.line = 0
	}
}

func (s *stage) act(words []string) error {
	switch words[0] {
	case "restart":
		var settings Settings
		for _, w := range words[1:] {
			switch k, v, _ := strings.Cut(w, "="); k {
			case "launched":
				settings.Launched = number(v)
			case "beside":
				settings.Beside = true
			case "peer-timeout":
				settings.PeerTimeout, _ = time.ParseDuration(v)
			}
		}
		s.restart(settings)
		return nil
	case "advance":
		s.step(Input{Advance: uint64(number(words[1]))})
		return nil
	case "wait":
		d, err := time.ParseDuration(words[1])
		until := s.now + d
		for { // as the shell does: a step at every deadline until then
			at, ok := s.machine.Deadline()
			if !ok || at > until {
				break
			}
			s.now = at
			s.step(Input{})
		}
		s.now = until
		s.step(Input{})
		return err
	}
	a := s.actors[words[0]]
	if a == nil {
		a = &actor{name: words[0], asked: map[uint64][]wire.Tensor{}}
		s.actors[a.name] = a
	}
	args := map[string]string{}
	var plain []string
	for _, w := range words[2:] {
		if k, v, ok := strings.Cut(w, "="); ok {
			args[k] = v
		} else {
			plain = append(plain, w)
		}
	}
	return s.say(a, words[1], plain, args)
}

func (s *stage) say(a *actor, verb string, plain []string, args map[string]string) error {
	s.lastID++
	m := &wire.Control{ID: s.lastID}
	switch verb {
	case "forgets": // the roster: it was on its way when the scheduler died
		a.known = wire.Known{}
		return nil
	case "poses":
		b := s.actors[plain[1]]
		a.register, a.known = b.register, b.known
		a.register.Node.Session += 1 << 20
		s.open(a, wire.RoleWorker)
		r := a.register
		r.Known, m.Register = &a.known, &r
	case "answers":
		s.step(Input{Answered: a.register.Node.Session})
		return nil
	case "ended":
		s.step(Input{Ended: a.register.Node.Session})
		return nil
	case "hello":
		s.open(a, wire.Role(plain[0]))
		return nil
	case "breaks":
		s.step(Input{Line: a.line, Closed: "it broke", Silent: len(plain) > 0})
		return nil
	case "register":
		a.register = registration(a, s.lastID, plain, args)
		a.known = wire.Known{}
		if a.line == 0 || s.machine.lines[a.line] == nil {
			s.open(a, a.register.Node.Role)
		}
		r := a.register
		m.Register, m.Wait = &r, float64(number(args["timeout"]))
	case "back":
		s.open(a, a.register.Node.Role)
		r, k := a.register, a.known
		r.More = args["more"] != ""
		if k.Roster.Round != 0 {
			r.Known, k.Silent = &k, args["silent"]
		}
		m.Register = &r
	case "declare":
		for _, word := range plain {
			m.Declare = append(m.Declare, tensor(a, word, uint32(number(args["set"]))))
		}
		a.asked[m.ID] = m.Declare
	case "add":
		m.AddSet, m.Position, m.Wait = numbers(plain[0]), uint64(number(args["at"])), float64(number(args["timeout"]))
	case "find":
		m.FindSet = numbers(plain[0])
	case "remove":
		m.RemoveID, m.Position = uint32(number(plain[0])), uint64(number(args["at"]))
	case "lost":
		why := strings.Join(plain[2:], " ")
		m.ID, m.Lost = 0, &wire.Lost{Role: wire.Role(plain[0]), Rank: number(plain[1]), Why: why, Silent: why == "silent"}
	case "bye":
		m.ID, m.Bye = 0, true
	case "farewell":
		m.ID, m.Farewell, a.known.Farewell = 0, true, true
	case "drain":
		m.Drain = &wire.Drain{Server: strings.Join(plain, ""), Empty: args["empty"] != ""}
	case "status":
		m.Status = &wire.StatusReply{Detail: len(plain) > 0}
	case "report":
		m.ID, m.Progress = 0, &wire.Progress{Query: a.query, Iteration: uint64(number(plain[0]))}
	case "measures": // SERVER=MB/s
		report := &wire.Profile{Round: a.known.Roster.Round}
		for _, server := range slices.Sorted(maps.Keys(args)) {
			mbs, _ := strconv.ParseFloat(args[server], 64)
			report.Servers = append(report.Servers, wire.Sample{Server: number(server), Alpha: 1e-6 / mbs, Bytes: 1e9, Seconds: 1e3 / mbs})
		}
		m.ID, m.Profile = 0, report
	case "nonsense":
	default:
		return fmt.Errorf("unknown verb %q", verb)
	}
	s.step(Input{Line: a.line, Message: m})
	return nil
}

func (s *stage) open(a *actor, role wire.Role) {
	s.lastLine++
	a.line = s.lastLine
	s.byLine[a.line] = a
	s.step(Input{Line: a.line, Hello: &wire.Hello{Role: role, Rank: a.register.Node.Rank}})
}

func registration(a *actor, id uint64, plain []string, args map[string]string) wire.Register {
	n := wire.Node{Role: wire.Role(plain[0]), Host: "host-" + a.name, PID: 10 + int(a.name[len(a.name)-1]-'0'), Version: "1.0"}
	if at := args["server"]; at != "" {
		n.Addresses = address.List{{Kind: "tcp", At: at}}
	}
	if n.Role == wire.RoleWorker {
		n.Rank = number(plain[1])
	} else if len(plain) > 1 {
		n.Addresses = address.List{{Kind: "tcp", At: plain[1]}}
	}
	if v, ok := args["version"]; ok {
		n.Version = v
	}
	n.Session, n.Standby = 1000+id, args["standby"]
	r := wire.Register{Node: n, Workers: number(args["of"]), Dedicated: number(args["dedicated"]), Placement: args["placement"], Elastic: args["elastic"] != "", LauncherRound: uint64(number(args["launcher"]))}
	for word, setting := range map[string]string{"sync": "PACELINE_SYNC", "in-rank-order": "PACELINE_SUM_IN_RANK_ORDER", "peer-timeout": "PACELINE_PEER_TIMEOUT"} {
		if v, ok := args[word]; ok {
			r.Alike = map[string]string{setting: v}
		}
	}
	return r
}

// tensor reads "name/partitions#generation"; its ranks are those of the set, as the actor knows it.
func tensor(a *actor, word string, set uint32) wire.Tensor {
	word, generation, _ := strings.Cut(word, "#")
	name, parts, _ := strings.Cut(word, "/")
	t := wire.Tensor{
		Name: name, Kind: units.Allreduce, Op: units.Sum, DType: units.Uint8, Prescale: 1, Postscale: 1,
		ProcessSet: set, Generation: uint64(number(generation)),
	}
	if strings.HasPrefix(name, "broadcast.") {
		t.Kind = units.Broadcast
	}
	for _, n := range numbers(parts) {
		t.Parts = append(t.Parts, uint32(n))
	}
	t.Ranks = rankset.Range(len(a.known.Roster.Workers)).Ranks()
	for _, s := range a.known.Sets {
		if s.ID == set {
			t.Ranks = s.Ranks
		}
	}
	return t
}

func number(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

func numbers(list string) (all []int) {
	for s := range strings.SplitSeq(list, ",") {
		all = append(all, number(s))
	}
	return all
}

// step makes one step and records the outputs.
func (s *stage) step(in Input) {
	in.Now = s.now
	for _, o := range s.machine.Step(in) {
		switch a := s.byLine[o.Line]; {
		case o.Log != "":
			s.said = append(s.said, "log: "+o.Log)
		case o.News != nil && o.News.Lost != nil:
			what := "the job"
			if o.News.Round > 0 {
				what = fmt.Sprintf("round %d of the launcher", o.News.Round)
			}
			s.said = append(s.said, what+" has given up "+name(o.News.Lost))
		case o.News != nil: // the roster that is sent says it
		case o.Probe != 0:
			s.said = append(s.said, "probe of "+o.Address)
		case o.Close:
			s.said = append(s.said, a.name+": closed")
		default:
			s.said = append(s.said, a.name+": "+a.hear(o.Message))
		}
	}
}

// hear stores what the client would, and returns the message as text.
func (a *actor) hear(m *wire.Control) string {
	switch {
	case m.Error != "":
		return "refused: " + m.Error
	case m.Roster != nil:
		a.known.Roster = *m.Roster
		text := fmt.Sprintf("roster of round %d, %d workers, servers", m.Roster.Round, len(m.Roster.Workers))
		for i, n := range m.Roster.Servers {
			at, _ := n.Addresses.Of("tcp")
			text += fmt.Sprintf(" %d=%s", i, at)
		}
		for _, g := range m.Roster.Gone {
			text += fmt.Sprintf(", without %s %d", g.Role, g.Rank)
		}
		for _, rank := range m.Roster.Left {
			text += fmt.Sprintf(", rank %d has left", rank)
		}
		if m.Roster.Epoch > 0 {
			text += fmt.Sprintf(", epoch %d", m.Roster.Epoch)
		}
		if m.ID == 0 {
			text += " (pushed)"
		}
		return text
	case m.Placed != nil:
		a.known.Tensors = append(a.known.Tensors, a.asked[m.ID]...)
		a.known.Placed = append(a.known.Placed, m.Placed...)
		var all []string
		for i, p := range m.Placed {
			all = append(all, fmt.Sprintf("%s is number %d on %v", a.asked[m.ID][i].Name, p.ID, p.Servers))
		}
		return strings.Join(all, ", ")
	case m.Set != nil:
		a.known.Sets = append(a.known.Sets, *m.Set)
		if !m.Set.Found {
			a.known.SetCalls++
		}
		return fmt.Sprintf("set %d is %v", m.Set.ID, m.Set.Ranks)
	case m.Removed != nil:
		return fmt.Sprintf("set %d of round %d is removed", m.Removed.ID, m.Removed.Round)
	case m.Lost != nil:
		return fmt.Sprintf("lost %s %d: %s", m.Lost.Role, m.Lost.Rank, m.Lost.Why)
	case m.Status != nil:
		text := fmt.Sprintf("status %s, waiting for %q, %d tensors, up %gs", m.Status.State, m.Status.Waiting, m.Status.Tensors, m.Status.Uptime)
		for _, n := range m.Status.Nodes {
			if text += fmt.Sprintf(", %s %d", n.Role, n.Rank); n.Progress != nil {
				text += fmt.Sprintf(" at %d", n.Progress.Iteration)
			} else {
				text += " " + n.State
			}
		}
		for i, s := range m.Status.Shares {
			if s.Keys > 0 {
				text += fmt.Sprintf(", server %d has %d bytes of %d keys", i, s.Bytes, s.Keys)
			}
		}
		for i, p := range m.Status.Profiles {
			text += fmt.Sprintf(", server %d has %.4g MB/s by %d workers, %.3g ± %.1g s", i, p.Speed/1e6, p.Workers, p.Seconds, p.Error)
		}
		if v := m.Status.Verdict; v != nil {
			text += fmt.Sprintf(", %s: remap %v, grow %v, ratio %.3g", v.Placement, v.Remap, v.Grow, v.Ratio)
		}
		return text
	case m.Drain != nil && m.ID == 0:
		return "leave the job"
	case m.Drain != nil:
		return "drain: yes"
	case m.Votes != nil:
		a.known.Votes = *m.Votes
		return fmt.Sprintf("settled %v, ended %v", m.Votes.Settled, m.Votes.Ended)
	case m.Progress != nil:
		a.query = m.Progress.Query
		return "how far are you?"
	}
	return fmt.Sprintf("%+v", m)
}
