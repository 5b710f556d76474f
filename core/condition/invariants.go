package condition

import "github.com/paceline/paceline/internal/invariant"

// check tests the invariants at the machine's type. v is V before the Step.
func (m *Machine) check(v uint64, out []Output) {
	for _, o := range out {
		if o.Kind == Advance {
			invariant.Check(o.Progress == v, "1: advance past %d when V was %d", o.Progress, v)
			v++
		}
	}
	invariant.Check(v == m.v, "1: V is %d after the last advance, want %d", m.v, v)
	for k, a := range m.open {
		count := 0
		for _, r := range a.from.Ranks() {
			if m.live.Has(r) {
				count++
			}
		}
		invariant.Check(count == a.count, "2: iteration %d counts %d live ranks of %v, want %d", m.v+uint64(k), a.count, a.from, count)
	}
	m.checkParked()
	if len(m.open) > 0 && m.open[0].from.Len() > 0 {
		invariant.Check(!m.closes(m.view(-1, m.v)), "5: iteration %d is open though %q holds", m.v, m.push)
	}
	fastest, slowest, at := m.fastest, m.slowest, m.atSlowest
	m.survey()
	invariant.Check(fastest == m.fastest && slowest == m.slowest && at == m.atSlowest,
		"6: fastest %d slowest %d (%d ranks), want %d %d (%d)", fastest, slowest, at, m.fastest, m.slowest, m.atSlowest)
}

func (m *Machine) checkParked() {
	waiting := 0
	for _, s := range m.ranks {
		waiting += int(s.parked)
	}
	invariant.Check(waiting == len(m.parked), "4: ranks have %d pulls parked, the machine %d", waiting, len(m.parked))
	for _, p := range m.parked {
		invariant.Check(p.filed >= m.v, "4: pull of rank %d iteration %d is filed under %d, which is closed", p.rank, p.progress, p.filed)
	}
}
