package server

import (
	"github.com/paceline/paceline/core/condition"
)

// Tally is what a server has counted.
type Tally struct {
	condition.Tally
	Withheld uint64 // answers to pulls that a gate held back
}

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
		for _, c := range t.cells() {
			n := c.tally()
			sum.Admitted += n.Admitted
			sum.Dropped += n.Dropped
			sum.Duplicate += n.Duplicate
			sum.Delayed += n.Delayed
		}
		for _, v := range t.heldParts() {
			v.mu.Lock()
			if v.coded != nil {
				sum.Withheld += v.coded.withheld
			}
			v.mu.Unlock()
		}
	}
	return sum
}
