package membership

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts runs the scripts in testdata. A script's lines are commands and comments; the indented lines
// under a command are its answer. A process is written incarnation, or incarnation@address where it holds a server,
// and a member as rank:0 or server:0. Commands:
//
//	found POLICY WORKER... / SERVER...   a round's first epoch
//	declare NAME/BYTES,BYTES...          tensors that are new, together
//	forget NUMBER                        a tensor
//	join worker|server PROCESS           drain INDEX            leave MEMBER
//	lose MEMBER WHY                      pushed COUNT...        part of the next change
//	profile ALPHA...                     of the servers, part of the next change; what the policy says to it
//	next                                 the epoch after that change
//	anew                                 all ranks have joined
//	frame EPOCH                          of another node
//	return MEMBER INCARNATION            of a process that says that it is a member
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func(words []string) []string {
		s := stage{t: t}
		return func(words []string) []string { return s.command(words[0], words[1:]) }
	})
}

// stage is the current epoch of a script, and the change that comes together.
type stage struct {
	t      *testing.T
	view   *View
	dealer *Dealer
	last   uint32
	change Change
}

func (s *stage) command(verb string, args []string) []string {
	switch verb {
	case "found":
		return s.found(args)
	case "declare":
		return s.declare(args)
	case "forget":
		s.dealer.Remove(uint32(s.number(args[0])))
	case "join":
		if n := s.process(args[1]); args[0] == "worker" {
			s.change.Workers = append(s.change.Workers, n)
		} else {
			s.change.Servers = append(s.change.Servers, n)
		}
	case "drain":
		s.change.Drain = append(s.change.Drain, s.number(args[0]))
	case "leave":
		s.change.Leave = append(s.change.Leave, s.member(args[0]))
	case "lose":
		s.change.Lose = append(s.change.Lose, Loss{Member: s.member(args[0]), Why: strings.Join(args[1:], " ")})
	case "pushed":
		for _, n := range args {
			s.change.Pushed = append(s.change.Pushed, uint64(s.number(n)))
		}
	case "profile":
		return s.profile(args)
	case "next":
		change := s.change
		s.change = Change{}
		next, err := s.view.Now().Next(change)
		return s.enter(next, err)
	case "anew":
		return s.enter(s.view.Now().Anew(), nil)
	case "return":
		if err := s.view.Now().Return(s.member(args[0]), uint64(s.number(args[1]))); err != nil {
			return []string{"refused: " + err.Error()}
		}
		return []string{"welcome"}
	default:
		s.t.Fatalf("unknown command %q", verb)
	}
	return nil
}

func (s *stage) found(args []string) []string {
	var workers, dedicated []Node
	list := &workers
	for _, word := range args[1:] {
		if word == "/" {
			list = &dedicated
			continue
		}
		*list = append(*list, s.process(word))
	}
	e, err := Found(7, args[0], workers, dedicated)
	if err != nil {
		return []string{"error: " + err.Error()}
	}
	s.view, s.last = nil, 0
	return s.enter(e, nil)
}

// enter makes an epoch the current one and says what is new in it.
func (s *stage) enter(e *Epoch, err error) []string {
	if err != nil {
		return []string{"error: " + err.Error()}
	}
	answers := describe(e)
	if s.view == nil {
		s.view = NewView(e)
	} else {
		for _, m := range Moves(s.view.Now(), e) {
			answers = append(answers, fmt.Sprintf("%s part %d moves from server %d to %d", e.Keys.Of(m.Number).Name.Name, m.Part, m.From, m.To))
		}
		if err := s.view.Advance(e); err != nil {
			s.t.Fatal(err)
		}
	}
	if s.dealer, err = NewDealer(e); err != nil {
		return append(answers, "error: "+err.Error())
	}
	return answers
}

// profile says how many seconds a byte each server takes, for two workers that agree.
func (s *stage) profile(alphas []string) []string {
	for _, alpha := range alphas {
		a := float64(s.number(alpha))
		sample := placement.Sample{Line: placement.Line{Alpha: a}, Bytes: 1, Seconds: a}
		s.change.Profiles = append(s.change.Profiles, placement.Profile{sample, sample})
	}
	v, err := s.view.Now().Judge(s.change.Profiles)
	if err != nil {
		s.t.Fatal(err)
	}
	return []string{fmt.Sprintf("remap %t, grow %t", v.Remap, v.Grow)}
}

func (s *stage) declare(args []string) (answers []string) {
	var fresh []*Tensor
	for _, word := range args {
		name, parts, _ := strings.Cut(word, "/")
		s.last++
		t := &Tensor{Number: s.last, Name: Name{Name: name}}
		for n := range strings.SplitSeq(parts, ",") {
			t.Parts = append(t.Parts, uint32(s.number(n)))
		}
		fresh = append(fresh, t)
	}
	s.dealer.Place(fresh)
	for _, t := range fresh {
		answers = append(answers, fmt.Sprintf("%s is number %d on %v", t.Name.Name, t.Number, t.Servers))
	}
	return answers
}

func describe(e *Epoch) []string {
	head := fmt.Sprintf("epoch %d from iteration %d, ranks %v", e.Number, e.First, e.Live())
	if e.Origin > 0 {
		head += fmt.Sprintf(", counted since epoch %d", e.Origin)
	}
	lines := []string{head}
	weights := e.Weights()
	for i, s := range e.Servers {
		where := "dedicated"
		if s.Rank != Dedicated {
			where = fmt.Sprintf("in rank %d", s.Rank)
		}
		state := [...]string{fmt.Sprintf("weight %.4g", weights[i]), "draining", "gone"}[s.State]
		lines = append(lines, fmt.Sprintf("server %d at %s, %s: %s", i, s.Addresses[0].At, where, state))
	}
	return lines
}

// process reads "incarnation" or "incarnation@address".
func (s *stage) process(word string) Node {
	incarnation, place, holds := strings.Cut(word, "@")
	n := Node{Incarnation: uint64(s.number(incarnation))}
	if holds {
		n.Addresses = at(place)
	}
	return n
}

func at(place string) address.List { return address.List{{Kind: "tcp", At: place}} }

func (s *stage) member(word string) Member {
	role, number, _ := strings.Cut(word, ":")
	m := Member{WorkerRole, s.number(number)}
	if role == "server" {
		m.Role = ServerRole
	}
	return m
}

func (s *stage) number(word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}
