package condition

import "github.com/paceline/paceline/internal/rankset"

// state is the rank's state, created at its first input.
func (m *Machine) state(rank int) *rankState {
	for len(m.ranks) <= rank {
		m.ranks = append(m.ranks, rankState{})
	}
	return &m.ranks[rank]
}

// setLive adopts a membership. New ranks start at the open iteration.
func (m *Machine) setLive(set rankset.Set) {
	for _, r := range set.Ranks() {
		if s := m.state(r); !m.live.Has(r) {
			s.since = m.v
			s.pushed = max(s.pushed, m.v)
		}
	}
	m.live = set.Clone()
	m.n = m.live.Len()
	for i := range m.open {
		a := &m.open[i]
		a.count = 0
		for _, r := range a.from.Ranks() {
			if m.live.Has(r) {
				a.count++
			}
		}
	}
	m.survey()
}

// note records an admitted push as its rank's progress.
func (m *Machine) note(in Input) {
	s := m.state(in.rank)
	s.significance = in.significance
	before := s.pushed
	s.pushed = max(before, in.progress+1)
	m.fastest = max(m.fastest, s.pushed)
	if before == m.slowest && s.pushed > before {
		if m.atSlowest--; m.atSlowest == 0 {
			m.survey() // the slowest has advanced: once per iteration, so O(1) per push
		}
	}
}

// survey recomputes the fastest and the slowest live rank.
func (m *Machine) survey() {
	m.fastest, m.slowest, m.atSlowest = 0, 0, 0
	first := true
	for r, s := range m.ranks {
		if !m.live.Has(r) {
			continue
		}
		m.fastest = max(m.fastest, s.pushed)
		switch {
		case first || s.pushed < m.slowest:
			m.slowest, m.atSlowest, first = s.pushed, 1, false
		case s.pushed == m.slowest:
			m.atSlowest++
		}
	}
}
