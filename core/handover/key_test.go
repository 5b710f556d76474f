package handover

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomSchedules plays one key whose servers are lost one after the other, and whose ranks die, at any moment. Messages of one rank arrive in any
// order. Every survivor gets the same results, each of them with the pushes of all survivors, and every iteration ends.
func TestRandomSchedules(t *testing.T) {
	schedules.Run(t, schedules.Anew(), 20_000, func(seed uint64) error { return play(rand.New(rand.NewPCG(seed, 0))) })
}

// server is what the shell of one does with a Key. A result is the set of ranks whose pushes are in it.
type server struct {
	key     Key
	open    uint64
	pushes  map[uint64]rankset.Set
	results map[uint64]string
}

// message is a push, or the supply of a result.
type message struct {
	from      int
	iteration uint64
	result    string // "" of a push
}

type job struct {
	*rand.Rand
	live    rankset.Set
	server  *server
	results [][]string // by rank and iteration
	sent    []message  // that have not arrived
}

const iterations = 6

func play(random *rand.Rand) error {
	n := 2 + random.IntN(4)
	j := &job{Rand: random, live: rankset.Range(n), results: make([][]string, n), server: newServer()}
	for rank := range n {
		j.push(rank)
	}
	losses, deaths := random.IntN(4), random.IntN(n)
	for steps := 0; len(j.sent) > 0; steps++ {
		switch random.IntN(12) {
		case 0:
			if losses--; losses >= 0 {
				j.loseServer()
				continue
			}
		case 1:
			if rank := random.IntN(n); j.live.Has(rank) && deaths > 0 {
				deaths--
				j.die(rank)
				continue
			}
		}
		i := random.IntN(len(j.sent))
		m := j.sent[i]
		j.sent = append(j.sent[:i], j.sent[i+1:]...)
		j.receive(m)
	}
	return j.check()
}

func newServer() *server {
	return &server{pushes: map[uint64]rankset.Set{}, results: map[uint64]string{}}
}

// push has a rank begin its next iteration.
func (j *job) push(rank int) {
	if done := uint64(len(j.results[rank])); done < iterations {
		j.sent = append(j.sent, message{from: rank, iteration: done})
	}
}

// loseServer has every rank give the heir its last result and its open push. What was on its way to the lost one is lost.
func (j *job) loseServer() {
	j.server, j.sent = newServer(), nil
	for _, rank := range j.live.Ranks() {
		if done := len(j.results[rank]); done > 0 {
			j.sent = append(j.sent, message{rank, uint64(done) - 1, j.results[rank][done-1]})
		}
		j.push(rank)
	}
}

func (j *job) die(rank int) {
	j.live.Remove(rank)
	kept := j.sent[:0]
	for _, m := range j.sent {
		if m.from != rank || j.IntN(2) == 0 { // what it sent may still arrive
			kept = append(kept, m)
		}
	}
	j.sent = kept
	if j.live.Len() == 0 {
		j.sent = nil
		return
	}
	for _, iteration := range j.server.key.Live(j.live) {
		j.sum(iteration)
	}
	j.close()
}

func (j *job) receive(m message) {
	s := j.server
	reached := m.iteration
	if m.result != "" {
		reached++
	}
	if reached > s.open {
		for i, pushed := range s.pushes {
			if i < reached && s.results[i] == "" {
				s.key.Reached(i, pushed)
			}
		}
		s.open = reached
	}
	switch result := s.results[m.iteration]; {
	case m.result != "" && result == "":
		by := s.key.By(m.iteration)
		s.key.Found(m.iteration)
		s.results[m.iteration] = m.result
		j.answer(m.iteration, by)
	case m.result != "":
	case result != "":
		j.answer(m.iteration, rankset.Of(m.from))
	default:
		pushed := s.pushes[m.iteration]
		pushed.Add(m.from)
		s.pushes[m.iteration] = pushed
		if m.iteration < s.open && s.key.Pushed(m.from, m.iteration, j.live) {
			j.sum(m.iteration)
		}
		j.close()
	}
}

// close closes the open iteration when every live rank has pushed it.
func (j *job) close() {
	s := j.server
	if pushed := s.pushes[s.open]; pushed.Len() > 0 && pushed.Covers(j.live) {
		s.open++
		j.sum(s.open - 1)
	}
}

func (j *job) sum(iteration uint64) {
	s := j.server
	s.key.Found(iteration)
	s.results[iteration] = s.pushes[iteration].String()
	j.answer(iteration, s.pushes[iteration])
}

// answer gives ranks a result, if it is the one that they lack.
func (j *job) answer(iteration uint64, ranks rankset.Set) {
	for _, rank := range ranks.Ranks() {
		if j.live.Has(rank) && uint64(len(j.results[rank])) == iteration {
			j.results[rank] = append(j.results[rank], j.server.results[iteration])
			j.push(rank)
		}
	}
}

func (j *job) check() error {
	for _, rank := range j.live.Ranks() {
		if n := len(j.results[rank]); n < iterations {
			return fmt.Errorf("rank %d of the live %v has %d results: %v; the server lacks %v", rank, j.live, n, j.results, j.server.key.lacking)
		}
		for i, result := range j.results[rank] {
			if first := j.results[j.live.Ranks()[0]][i]; result != first {
				return fmt.Errorf("iteration %d: %s on rank %d, %s on another", i, result, rank, first)
			}
			for _, other := range j.live.Ranks() {
				if !has(result, other) {
					return fmt.Errorf("iteration %d is %s, without rank %d", i, result, other)
				}
			}
		}
	}
	return nil
}

func has(result string, rank int) bool {
	for _, c := range result {
		if c == rune('0'+rank) {
			return true
		}
	}
	return false
}
