package server

import (
	"cmp"
	"slices"
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// Waits names what waits for ranks on this server: the operations whose home it is, and the reads of held values. The
// longest come first, at most wire.MaxWaits.
func (s *Server) Waits() []wire.Stall {
	r := s.running()
	if r == nil {
		return nil
	}
	n := &r.names
	n.mu.Lock()
	named := n.home.Longest(time.Since(n.began), wire.MaxWaits)
	n.mu.Unlock()
	var all []wire.Stall
	for _, w := range named {
		all = append(all, wire.Stall{Name: w.Name, Missing: w.Missing.Ranks(), Seconds: w.Waited.Seconds()})
	}
	for _, t := range r.inUse() {
		if t.held == nil {
			continue
		}
		if since, missing, ok := t.held.Waits(); ok && missing.Len() > 0 {
			all = append(all, wire.Stall{Name: t.Name, Missing: missing.Ranks(), Seconds: time.Since(since).Seconds()})
		}
	}
	slices.SortStableFunc(all, func(a, b wire.Stall) int { return -cmp.Compare(a.Seconds, b.Seconds) })
	return all[:min(len(all), wire.MaxWaits)]
}
