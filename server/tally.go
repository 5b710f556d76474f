package server

import "github.com/paceline/paceline/server/condition"

// Tally is what the machines of the running round have counted since its tensors were declared.
func (s *Server) Tally() condition.Tally {
	var sum condition.Tally
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
	}
	return sum
}
