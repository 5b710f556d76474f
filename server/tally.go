package server

import (
	"github.com/paceline/paceline/server/room"
)

// Tally is what a server has counted.
type Tally = room.Tally

// Tally is what the running round has counted since its tensors were declared.
func (s *Server) Tally() Tally {
	var sum Tally
	s.mu.Lock()
	r := s.round
	s.mu.Unlock()
	if r == nil {
		return sum
	}
	for _, t := range r.inUse() {
		n := t.sums.Tally()
		sum.Add(n.Tally)
		for _, v := range t.heldParts() {
			sum.Add(v.tally())
			v.mu.Lock()
			if v.coded != nil {
				sum.Withheld += v.coded.withheld
			}
			v.mu.Unlock()
		}
	}
	return sum
}
