package server

import "github.com/paceline/paceline/server/room"

// Tally is what the running round has counted since its tensors were declared.
func (s *Server) Tally() (sum room.Tally) {
	s.mu.Lock()
	r := s.round
	s.mu.Unlock()
	if r == nil {
		return sum
	}
	for _, t := range r.inUse() {
		sum.Add(t.keys.Tally())
	}
	return sum
}
