package membership

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomJoins lets servers of an elastic job join, be drained and be lost in random order, at a scheduler and at nodes that hear of some of its
// epochs, many at once. A key goes on where the scheduler has placed it, by the reckoning of every node that has heard of as much, whatever it had
// heard of before; it leaves no server that is live, and no server inherits what was lost before it joined.
func TestRandomJoins(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 200, func(seed uint64) error {
		s := joins{schedule: schedule{Rand: rand.New(rand.NewPCG(seed, 2))}}
		return s.run(30)
	})
}

// joins is one random life of an elastic job's servers.
type joins struct {
	schedule
	now      *Epoch
	nodes    []*View
	declared map[uint32]*Tensor // as their ranks have them, with the servers of the declaration
}

func (s *joins) run(steps int) error {
	workers, servers := s.processes(1+s.IntN(4), 0.5), s.processes(1+s.IntN(3), 1)
	first, err := Found(1, "round-robin", workers, servers)
	if err != nil {
		return err
	}
	first.Elastic = true
	s.now, s.declared = first, map[uint32]*Tensor{}
	for range 3 {
		node := *first
		node.Keys = Keys{}
		s.nodes = append(s.nodes, NewView(&node))
	}
	for range steps {
		if err := s.place(); err != nil {
			return err
		}
		if err := s.step(); err != nil {
			return err
		}
		for i, node := range s.nodes {
			if s.IntN(3) == 0 {
				if err := s.hear(node); err != nil {
					return fmt.Errorf("node %d: %w", i, err)
				}
			}
		}
	}
	return nil
}

// place declares tensors on the servers that are there now.
func (s *joins) place() error {
	dealer, err := NewDealer(s.now)
	if err != nil {
		return err
	}
	for range s.IntN(3) {
		s.last++
		t := &Tensor{Number: s.last, Name: Name{Name: fmt.Sprint("t", s.last)}, Parts: make([]uint32, 1+s.IntN(4))}
		dealer.Place([]*Tensor{t})
		s.declared[t.Number] = t
	}
	return nil
}

// step has a server or two come or go.
func (s *joins) step() error {
	var c Change
	if s.IntN(2) == 0 {
		c.Servers = s.processes(1+s.IntN(2), 1)
	}
	for range s.IntN(3) {
		c.Lose = append(c.Lose, Loss{Member: s.member(s.now), Drained: s.IntN(2) == 0, Why: "chance"})
	}
	c.Remap = s.IntN(3) == 0
	next, err := s.now.Next(c)
	if err != nil { // a loss of a server that has gone, or of all: it changes nothing
		return nil
	}
	for _, m := range Moves(s.now, next) {
		if next.Servers[m.To].State == Live && c.Remap {
			continue
		}
		if next.Servers[m.From].State == Live || next.Servers[m.To].State != Live || m.To >= len(s.now.Servers) {
			return fmt.Errorf("%+v from epoch %d with %d servers", m, s.now.Number, len(s.now.Servers))
		}
	}
	for i, server := range s.now.Servers {
		if next.Servers[i].Incarnation != server.Incarnation {
			return fmt.Errorf("server %d is another process", i)
		}
	}
	s.now = next
	return nil
}

// hear has a node follow the scheduler, and reckon where each key is.
func (s *joins) hear(node *View) error {
	before := node.Now()
	news, err := node.Follow(s.now)
	if err != nil {
		return err
	}
	now := node.Now()
	if len(now.Servers) != len(before.Servers)+len(news.Joined) || len(now.Departures()) != len(before.Departures())+len(news.Lost) || len(now.Servers) != len(s.now.Servers) {
		return fmt.Errorf("%+v: %d servers become %d", news, len(before.Servers), len(now.Servers))
	}
	for number, t := range s.declared {
		here, there := now.Inherited(t).Servers, s.now.Keys.Of(number).Servers
		if !slices.Equal(here, there) {
			return fmt.Errorf("tensor %d, declared on %v, is on %v, and on %v at the scheduler", number, t.Servers, here, there)
		}
	}
	return nil
}
