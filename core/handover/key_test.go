package handover

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/schedules"
)

// TestRandomSchedules plays one key whose servers are lost or drained one after the other, and whose ranks die, at any moment. Messages of one rank arrive in any
// order. Ranks leave a server that is drained one by one, while it answers the others. Every survivor gets the same results, each of them with the pushes of all survivors, and every iteration ends.
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
	to        *server
	iteration uint64
	result    string // "" of a push
}

type job struct {
	*rand.Rand
	live    rankset.Set
	servers []*server  // the last is the present one; one before it is being drained
	at      []*server  // by rank: the one that it uses
	results [][]string // by rank and iteration
	sent    []message  // that have not arrived
}

const iterations = 6

func play(random *rand.Rand) error {
	n := 2 + random.IntN(4)
	j := &job{Rand: random, live: rankset.Range(n), results: make([][]string, n), servers: []*server{newServer()}, at: make([]*server, n)}
	for rank := range n {
		j.at[rank] = j.present()
		j.push(rank)
	}
	losses, drains, deaths := random.IntN(4), random.IntN(4), random.IntN(n)
	for steps := 0; len(j.sent) > 0 || j.follow(nil); steps++ {
		switch random.IntN(12) {
		case 0:
			if losses--; losses >= 0 {
				j.loseServer()
				continue
			}
		case 2:
			if drains--; drains >= 0 && !j.draining() { // one after the other: else a lost rank's result may reach some, and the others' server not
				j.servers = append(j.servers, newServer())
				continue
			}
		case 3:
			if j.follow(nil) {
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
		j.sent = append(j.sent, message{from: rank, to: j.at[rank], iteration: done})
	}
}

func (j *job) present() *server { return j.servers[len(j.servers)-1] }

func (j *job) draining() bool {
	return slices.ContainsFunc(j.live.Ranks(), func(rank int) bool { return j.at[rank] != j.present() })
}

// loseServer has every rank that uses a server go over to the heir. What was on its way to the lost one is lost.
func (j *job) loseServer() {
	i := j.IntN(len(j.servers))
	lost := j.servers[i]
	j.servers = slices.Delete(j.servers, i, i+1)
	if i == len(j.servers) {
		j.servers = append(j.servers, newServer())
	}
	j.sent = slices.DeleteFunc(j.sent, func(m message) bool { return m.to == lost })
	for j.follow(lost) {
	}
}

// follow has a rank that still uses a server which is lost, or one that is drained (nil), go over to the present one, and reports whether there was one.
// The rank gives the heir its last result and its open push. What it sent before may still arrive at the old one.
func (j *job) follow(left *server) bool {
	for _, i := range j.Perm(len(j.at)) {
		if !j.live.Has(i) || j.at[i] == j.present() || left != nil && j.at[i] != left {
			continue
		}
		j.at[i] = j.present()
		if done := len(j.results[i]); done > 0 {
			j.sent = append(j.sent, message{i, j.present(), uint64(done) - 1, j.results[i][done-1]})
		}
		j.push(i)
		return true
	}
	return false
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
	for _, s := range j.servers {
		for _, iteration := range s.key.Live(j.live) {
			j.sum(s, iteration)
		}
		j.close(s)
	}
}

func (j *job) receive(m message) {
	s := m.to
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
		j.answer(s, m.iteration, by)
	case m.result != "":
	case result != "":
		j.answer(s, m.iteration, rankset.Of(m.from))
	default:
		pushed := s.pushes[m.iteration]
		pushed.Add(m.from)
		s.pushes[m.iteration] = pushed
		if m.iteration < s.open && s.key.Pushed(m.from, m.iteration, j.live) {
			j.sum(s, m.iteration)
		}
		j.close(s)
	}
}

// close closes the open iteration when every live rank has pushed it.
func (j *job) close(s *server) {
	if pushed := s.pushes[s.open]; pushed.Len() > 0 && pushed.Covers(j.live) {
		s.open++
		j.sum(s, s.open-1)
	}
}

func (j *job) sum(s *server, iteration uint64) {
	s.key.Found(iteration)
	s.results[iteration] = s.pushes[iteration].String()
	j.answer(s, iteration, s.pushes[iteration])
}

// answer gives ranks a result, if it is the one that they lack and they still use the server.
func (j *job) answer(s *server, iteration uint64, ranks rankset.Set) {
	for _, rank := range ranks.Ranks() {
		if j.live.Has(rank) && j.at[rank] == s && uint64(len(j.results[rank])) == iteration {
			j.results[rank] = append(j.results[rank], s.results[iteration])
			j.push(rank)
		}
	}
}

func (j *job) check() error {
	for _, rank := range j.live.Ranks() {
		if n := len(j.results[rank]); n < iterations {
			return fmt.Errorf("rank %d of the live %v has %d results: %v; the server lacks %v", rank, j.live, n, j.results, j.present().key.lacking)
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
