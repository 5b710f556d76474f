package fleet

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/schedules"
	"github.com/paceline/paceline/internal/transcript"
)

// TestTranscripts plays the scripts in testdata:
//
//	fleet first=2 min=1 max=4 limit=3 cooldown=10s,40s goes-on   a new fleet, with a timeout of 60 s, 20 s for starts and a warning after 30 s
//	hosts a:2 b:1           the hosts that there are now; "hosts" alone: none
//	ask 0 1                 processes ask; with "state" or "state:3" at the end they have the state, of so many commits, with "skip" they need nobody else's, with "early" they are not ready
//	lost 2 1                round 2 has given up rank 1
//	end 1                   processes fail; with "ok" at the end they have come to the end
//	wait 5s                 time passes, to each deadline on the way
func TestTranscripts(t *testing.T) {
	transcript.Run(t, "testdata/*.txt", func(t *testing.T) func([]string) []string {
		s := &stage{t: t}
		return s.act
	})
}

type stage struct {
	t       *testing.T
	machine *Machine
	now     time.Duration
	said    []string
}

func (s *stage) act(words []string) []string {
	s.said = nil
	last, numbers := words[len(words)-1], words[1:]
	if _, err := strconv.Atoi(last); err != nil && len(words) > 2 {
		numbers = words[1 : len(words)-1]
	}
	switch words[0] {
	case "fleet":
		s.machine, s.now = NewMachine(settingsOf(s.t, words[1:])), 0
	case "hosts":
		var hosts []Host
		for _, w := range words[1:] {
			name, slots, _ := strings.Cut(w, ":")
			hosts = append(hosts, Host{name, number(s.t, slots)})
		}
		s.step(Input{Found: true, Hosts: hosts})
	case "ask":
		for _, n := range numbers {
			a := Ask{Process: number(s.t, n), State: last == "skip", Skip: last == "skip", Early: last == "early"}
			if _, commits, ok := strings.Cut(last, "state"); ok {
				a.State = true
				a.Commits, _ = strconv.ParseUint(strings.TrimPrefix(commits, ":"), 10, 64)
			}
			s.step(Input{Ask: &a})
		}
	case "lost":
		s.step(Input{Lost: &Lost{uint64(number(s.t, words[1])), number(s.t, words[2])}})
	case "end":
		for _, n := range numbers {
			s.step(Input{Ended: &Ended{number(s.t, n), last == "ok"}})
		}
	case "wait":
		until := s.now + span(s.t, words[1])
		for at, ok := s.machine.Deadline(); ok && at <= until; at, ok = s.machine.Deadline() {
			s.now = max(at, s.now)
			s.step(Input{})
		}
		s.now = until
		s.step(Input{})
	default:
		s.t.Fatalf("unknown command %q", words[0])
	}
	return s.said
}

func (s *stage) step(in Input) {
	in.Now = s.now
	for _, o := range s.machine.Step(in) {
		s.said = append(s.said, fmt.Sprintf("%v %s", s.now, show(o)))
	}
}

func show(o Output) string {
	switch {
	case o.Start != nil:
		return fmt.Sprintf("start %d on %s, slot %d", o.Start.Process, o.Start.Host, o.Start.Slot)
	case o.Stop != nil:
		return fmt.Sprintf("stop %d: %s", o.Stop.Process, o.Stop.Why)
	case o.Dismiss != nil:
		return fmt.Sprintf("dismiss %d: %s", o.Dismiss.Process, o.Dismiss.Why)
	case o.Broken > 0:
		return fmt.Sprintf("round %d is broken", o.Broken)
	case o.News != nil:
		return fmt.Sprintf("news %d, removed=%v", o.News.Number, o.News.Removed)
	case o.Round != nil:
		text := fmt.Sprintf("round %d, skip=%v, news %d:", o.Round.Number, o.Round.Skip, o.Round.News)
		for _, p := range o.Round.Members {
			text += fmt.Sprintf(" %d@%s", p.Process, p.Host)
		}
		return text
	case o.Expect != nil:
		text := fmt.Sprintf("expect %d:", o.Expect.Process)
		for _, p := range o.Expect.Members {
			text += fmt.Sprintf(" %d@%s", p.Process, p.Host)
		}
		return text
	case o.Fail != "":
		return "fail: " + o.Fail
	case o.Done:
		return "done"
	}
	return "say: " + o.Say
}

func settingsOf(t *testing.T, words []string) Settings {
	s := Settings{Timeout: time.Minute, Start: 20 * time.Second, Warning: 30 * time.Second}
	for _, w := range words {
		name, value, _ := strings.Cut(w, "=")
		switch name {
		case "first":
			s.First = number(t, value)
		case "min":
			s.Min = number(t, value)
		case "max":
			s.Max = number(t, value)
		case "limit":
			s.ResetLimit = number(t, value)
		case "goes-on":
			s.GoesOn = true
		case "cooldown":
			low, high, _ := strings.Cut(value, ",")
			s.Cooldown = [2]time.Duration{span(t, low), span(t, high)}
		default:
			t.Fatalf("unknown setting %q", w)
		}
	}
	return s
}

func number(t *testing.T, word string) int {
	n, err := strconv.Atoi(word)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func span(t *testing.T, word string) time.Duration {
	d, err := time.ParseDuration(word)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestRandomSchedules plays hosts, deaths, requests and time at random. Nobody has two places; no round begins without a live
// member of the one before; rank 0 has the state where anybody has; and whoever asks is answered, as long as time passes.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 3000, func(seed uint64) error { return newSchedule(seed).run() })
}

type schedule struct {
	rng     *rand.Rand
	machine *Machine
	now     time.Duration
	live    map[int]*actor
	rounds  int
	trained bool // somebody has had the state
	over    bool
}

type actor struct {
	host                 string
	slot                 int
	asked, state, member bool
	seats                int // that it has had
	rank                 int // in the newest of them
	commits              uint64
}

func newSchedule(seed uint64) *schedule {
	r := rand.New(rand.NewPCG(seed, 1))
	settings := Settings{First: 1 + r.IntN(3), Min: 1, Timeout: time.Minute, Start: 20 * time.Second, GoesOn: r.IntN(2) == 0}
	settings.Max = settings.First + r.IntN(3)
	if r.IntN(3) > 0 {
		settings.Cooldown = [2]time.Duration{time.Second, 4 * time.Second}
	}
	return &schedule{rng: r, machine: NewMachine(settings), live: map[int]*actor{}}
}

func (s *schedule) run() error {
	for range 60 {
		if err := s.event(); err != nil || s.over {
			return err
		}
	}
	return s.settle()
}

// settle has everybody ask who does not wait, and time pass: whoever waited before has got a place by then, or has gone.
func (s *schedule) settle() error {
	for range 20 {
		waited := map[int]int{} // seats so far
		for _, n := range slices.Sorted(maps.Keys(s.live)) {
			if s.live[n].asked {
				waited[n] = s.live[n].seats
			}
		}
		for _, n := range slices.Sorted(maps.Keys(s.live)) {
			if err := s.ask(n); err != nil || s.over {
				return err
			}
		}
		s.now += 70 * time.Second
		if err := s.step(Input{}); err != nil || s.over {
			return err
		}
		for n, seats := range waited {
			if a := s.live[n]; a != nil && a.seats == seats {
				return fmt.Errorf("%d has asked and is not answered", n)
			}
		}
	}
	return nil
}

func (s *schedule) event() error {
	all := slices.Sorted(maps.Keys(s.live))
	kind := s.rng.IntN(7)
	switch {
	case kind == 0:
		var hosts []Host
		for _, name := range []string{"a", "b", "c"} {
			if slots := s.rng.IntN(4); slots > 0 {
				hosts = append(hosts, Host{name, slots})
			}
		}
		return s.step(Input{Found: true, Hosts: hosts})
	case kind == 1 || len(all) == 0:
		s.now += time.Duration(s.rng.IntN(5000)) * time.Millisecond
		return s.step(Input{})
	case kind == 6:
		return s.lose(s.rng.IntN(4))
	case kind == 2:
		return s.step(Input{Ended: &Ended{Process: all[s.rng.IntN(len(all))]}})
	}
	n := all[s.rng.IntN(len(all))]
	if kind == 3 {
		return s.early(n)
	}
	return s.ask(n)
}

// lose has the others give up a rank, whose process lives. Nobody waits for it.
func (s *schedule) lose(rank int) error {
	for _, a := range s.live {
		if a.member && a.rank == rank && !a.asked {
			a.member = false
		}
	}
	return s.step(Input{Lost: &Lost{uint64(s.rounds), rank}})
}

// ask has a process ask, unless it waits already. A member may have got the state in its round.
func (s *schedule) ask(n int) error {
	a := s.live[n]
	if a == nil || a.asked {
		return nil
	}
	a.asked = true
	a.state = a.state || a.member && s.rng.IntN(2) == 0
	s.trained = s.trained || a.state
	if a.state && a.member {
		a.commits += uint64(s.rng.IntN(3))
	}
	return s.step(Input{Ask: &Ask{Process: n, State: a.state, Commits: a.commits}})
}

// early has a new process ask for the place to expect, which it is told at once where there has been a round.
func (s *schedule) early(n int) error {
	a := s.live[n]
	if a.asked || a.seats > 0 {
		return nil
	}
	a.asked = true
	err := s.step(Input{Ask: &Ask{Process: n, Early: true}})
	if s.rounds > 0 && s.live[n] != nil && a.asked {
		return fmt.Errorf("%d is not told which place to expect", n)
	}
	return err
}

// step gives the machine an input, then the ends of the processes that it stops.
func (s *schedule) step(in Input) error {
	for queue := []Input{in}; len(queue) > 0; queue = queue[1:] {
		next := queue[0]
		next.Now = s.now
		if next.Ended != nil {
			delete(s.live, next.Ended.Process)
		}
		for _, o := range s.machine.Step(next) {
			switch {
			case o.Start != nil:
				if slices.ContainsFunc(slices.Collect(maps.Values(s.live)), func(a *actor) bool { return a.host == o.Start.Host && a.slot == o.Start.Slot }) {
					return fmt.Errorf("%d gets slot %d of %s, which another process has", o.Start.Process, o.Start.Slot, o.Start.Host)
				}
				s.live[o.Start.Process] = &actor{host: o.Start.Host, slot: o.Start.Slot}
			case o.Stop != nil:
				queue = append(queue, Input{Ended: &Ended{Process: o.Stop.Process}})
			case o.Dismiss != nil:
				queue = append(queue, Input{Ended: &Ended{Process: o.Dismiss.Process, OK: true}})
			case o.Round != nil:
				if err := s.begin(o.Round); err != nil {
					return err
				}
			case o.Expect != nil:
				s.live[o.Expect.Process].asked = false
				if !slices.ContainsFunc(o.Expect.Members, func(p Place) bool { return p.Process == o.Expect.Process }) {
					return fmt.Errorf("%d is told of a round without it", o.Expect.Process)
				}
			}
			s.over = s.over || o.Fail != "" || o.Done
		}
	}
	return nil
}

// begin checks a round.
func (s *schedule) begin(r *Round) error {
	s.rounds++
	seats := map[int]bool{}
	for rank, p := range r.Members {
		a := s.live[p.Process]
		switch {
		case a == nil || !a.asked || seats[p.Process]:
			return fmt.Errorf("round %d has %d, which waits for none", r.Number, p.Process)
		case rank == 0 && s.trained && !a.state:
			return fmt.Errorf("round %d begins with %d, which has no state", r.Number, p.Process)
		case a.state && a.commits > r.Commits || rank == 0 && a.state && a.commits < r.Commits:
			return fmt.Errorf("round %d begins with the state of %d commits, and rank %d has one of %d", r.Number, r.Commits, rank, a.commits)
		}
		seats[p.Process] = true
		a.seats++
		a.rank, a.commits = rank, r.Commits
	}
	for n, a := range s.live {
		if a.member && !a.asked {
			return fmt.Errorf("round %d began without %d, which is in the one before", r.Number, n)
		}
		a.member, a.asked = seats[n], a.asked && !seats[n]
	}
	return nil
}
