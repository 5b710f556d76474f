package membership

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomSchedules lets members join, drain, leave and get lost, and tensors be declared and forgotten, in random
// order, and holds every epoch against the invariants at its type.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 100, func(seed uint64) error {
		s := schedule{Rand: rand.New(rand.NewPCG(seed, 1)), lost: map[uint64]Member{}}
		return s.run(60)
	})
}

// schedule is one random life of a round.
type schedule struct {
	*rand.Rand
	view         *View
	dealer       *Dealer
	incarnations uint64
	last         uint32
	lost         map[uint64]Member
}

func (s *schedule) run(steps int) error {
	policy := placement.Names()[s.IntN(len(placement.Names()))]
	e, err := Found(1+s.Uint64(), policy, s.processes(1+s.IntN(5), 0.7), s.processes(1+s.IntN(3), 1))
	if err != nil {
		return err
	}
	s.view = NewView(e)
	for range steps {
		if s.dealer, err = NewDealer(s.view.Now()); err != nil {
			return err
		}
		s.declare()
		if s.IntN(20) == 0 {
			err = s.advance(s.view.Now().Anew())
		} else {
			err = s.change()
		}
		if err != nil {
			return fmt.Errorf("epoch %d: %w", s.view.Now().Number, err)
		}
	}
	return nil
}

// processes makes new ones, of which a share holds servers.
func (s *schedule) processes(n int, servers float64) []Node {
	nodes := make([]Node, n)
	for i := range nodes {
		s.incarnations++
		nodes[i].Incarnation = s.incarnations
		if s.Float64() < servers {
			nodes[i].Addresses = at(fmt.Sprintf("h:%d", s.incarnations))
		}
	}
	return nodes
}

func (s *schedule) declare() {
	fresh := make([]*Tensor, s.IntN(4))
	for i := range fresh {
		s.last++
		fresh[i] = &Tensor{Number: s.last, Name: Name{Name: fmt.Sprint("t", s.IntN(10))}, Parts: make([]uint32, 1+s.IntN(6))}
		for part := range fresh[i].Parts {
			fresh[i].Parts[part] = s.Uint32N(1 << 20)
		}
	}
	s.dealer.Place(fresh)
	if s.last > 0 {
		s.dealer.Remove(1 + s.Uint32N(s.last)) // which may be gone already
	}
}

// change makes a random one. What cannot be is refused and changes nothing; a change in which members only join can be.
func (s *schedule) change() error {
	e := s.view.Now()
	before := fmt.Sprintf("%+v %+v", e.Workers, e.Servers)
	c := Change{Workers: s.processes(s.IntN(2), 0.7), Servers: s.processes(s.IntN(2), 1)}
	for range s.IntN(3) {
		c.Lose = append(c.Lose, Loss{Member: s.member(e), Why: "chance"})
	}
	for range s.IntN(2) {
		c.Drain = append(c.Drain, s.IntN(len(e.Servers)))
	}
	for range s.IntN(2) {
		c.Leave = append(c.Leave, s.member(e))
	}
	if s.IntN(3) == 0 {
		c.Profiles = s.profiles(len(e.Servers))
	}
	for range s.IntN(4) {
		c.Pushed = append(c.Pushed, s.Uint64N(100*uint64(e.Number)+100))
	}
	next, err := e.Next(c)
	if after := fmt.Sprintf("%+v %+v", e.Workers, e.Servers); after != before {
		return fmt.Errorf("%+v has changed the epoch before:\n%s\n%s", c, before, after)
	}
	if err != nil {
		if len(c.Lose)+len(c.Drain)+len(c.Leave) == 0 {
			return fmt.Errorf("%+v is refused: %w", c, err)
		}
		return nil
	}
	for _, l := range c.Lose {
		s.lost[e.Node(l.Member).Incarnation] = l.Member
	}
	for _, n := range c.Pushed {
		if next.First < n {
			return fmt.Errorf("it holds from iteration %d, and %d were pushed", next.First, n)
		}
	}
	return s.advance(next)
}

// profiles are of some of n servers.
func (s *schedule) profiles(n int) placement.Profiles {
	profiles := make(placement.Profiles, n)
	for i := range profiles {
		for range s.IntN(3) {
			profiles[i] = append(profiles[i], placement.Sample{Line: placement.Line{Alpha: s.Float64(), Beta: s.Float64()}, Bytes: 1, Seconds: s.Float64()})
		}
	}
	return profiles
}

// member picks a place, which may be free.
func (s *schedule) member(e *Epoch) Member {
	if s.IntN(2) == 0 {
		return Member{ServerRole, s.IntN(len(e.Servers))}
	}
	return Member{WorkerRole, s.IntN(len(e.Workers))}
}

// advance moves on and holds the next epoch against the invariants.
func (s *schedule) advance(next *Epoch) error {
	before := s.view.Now()
	if err := s.view.Advance(next); err != nil {
		return err
	}
	if next.Number != before.Number+1 {
		return fmt.Errorf("1: it is followed by epoch %d", next.Number)
	}
	if next.Origin == before.Origin && next.First < before.First || next.Origin < before.Origin {
		return fmt.Errorf("3: from iteration %d of epoch %d back to %d of %d", before.First, before.Origin, next.First, next.Origin)
	}
	for incarnation, m := range s.lost {
		gone := new(GoneError)
		if err := next.Return(m, incarnation); !errors.As(err, &gone) || !gone.Lost {
			return fmt.Errorf("4: %v, lost as %d, comes back: %w", m, incarnation, err)
		}
	}
	if len(s.lost) > 0 {
		incarnation, gone := slices.Sorted(maps.Keys(s.lost))[s.IntN(len(s.lost))], new(GoneError)
		if _, err := next.Next(Change{Servers: []Node{{Incarnation: incarnation, Addresses: at("h:1")}}}); !errors.As(err, &gone) {
			return fmt.Errorf("4: %d joins again: %w", incarnation, err)
		}
	}
	return s.checkKeys(before, next)
}

func (s *schedule) checkKeys(before, next *Epoch) error {
	moved := map[string]bool{}
	policy, err := placement.Parse(next.Policy)
	if err != nil {
		return err
	}
	for _, m := range Moves(before, next) {
		if !policy.Remaps() && before.Servers[m.From].State == Live && next.Servers[m.From].State == Live && before.Servers[m.From].Incarnation == next.Servers[m.From].Incarnation {
			return fmt.Errorf("%+v, from a server that stays", m)
		}
		moved[fmt.Sprint(m.Number, " ", m.Part)] = true
	}
	homes := map[Name]int{}
	for _, t := range next.Keys.all() {
		if home, known := homes[t.Name]; known && home != t.Servers[0] {
			return fmt.Errorf("%v has two homes, %d and %d", t.Name, home, t.Servers[0])
		}
		homes[t.Name] = t.Servers[0]
		for part, at := range t.Servers {
			if next.Servers[at].State != Live {
				return fmt.Errorf("2: partition %d of tensor %d is on server %d, which is not live", part, t.Number, at)
			}
			if was := before.Keys.Of(t.Number).Servers[part]; was != at && !moved[fmt.Sprint(t.Number, " ", part)] {
				return fmt.Errorf("partition %d of tensor %d goes from %d to %d unseen", part, t.Number, was, at)
			}
		}
	}
	if next.Origin == before.Origin && next.Keys.Len() != before.Keys.Len() {
		return fmt.Errorf("%d tensors become %d", before.Keys.Len(), next.Keys.Len())
	}
	return nil
}
