package condition

// Optional properties of a condition. Without these methods nothing is assumed of a condition: the server, the
// worker and the simulator never ask for its type.
type (
	// Quorum is a push condition that knows how many of n live ranks close an iteration.
	Quorum interface{ Quorum(n int) int }
	// Whole is a push condition that closes no iteration without every live rank's push, so that no push
	// is dropped and a sum can be formed while pushes arrive.
	Whole interface{ Whole() bool }
	// Bounded is a pull condition or a tuner that bounds the lead with which a waiting worker pushes.
	Bounded interface {
		Bound() (lead uint64, bounded bool)
	}
	// Narrow is a pull condition that reads only Rank, Progress and V of a view.
	Narrow interface{ Narrow() bool }
	// Significant is a condition that may read the significance of a push, which the worker computes.
	Significant interface{ AsksSignificance() bool }
)

// Traits are the properties of a model for a caller that has its setting.
type Traits struct {
	Setting      string   // in the form that Parse makes the same model of
	Ahead        bool     // a rank may run ahead of the slowest
	Dataflow     Dataflow // that a tensor is declared with; Accumulate wherever a rank may run ahead
	Whole        bool     // no iteration closes without every live rank's push
	Supersteps   bool     // ranks run freely between barriers
	Significance bool     // pushes carry their significance
	Tuned        bool     // the pull condition moves while training runs
}

// Properties are the traits of the model that a setting names.
func Properties(setting string) (Traits, error) {
	m, err := Parse(setting)
	if err != nil {
		return Traits{}, err
	}
	return m.Traits(), nil
}

// Traits are the model's properties.
func (m Model) Traits() Traits {
	t := Traits{
		Setting: m.Name, Ahead: m.Ahead(), Whole: m.Whole(), Dataflow: m.Dataflow, Supersteps: m.Supersteps != nil, Tuned: m.Tuner != nil,
		Significance: asksSignificance(m.Pull) || asksSignificance(m.Push),
	}
	if t.Ahead {
		t.Dataflow = Accumulate
	}
	return t
}

// Ahead reports whether a rank may run ahead of the slowest.
func (m Model) Ahead() bool { return m.Supersteps != nil || m.Tuner != nil || m.Pull.Ahead() }

// Whole reports whether no iteration closes without every live rank's push.
func (m Model) Whole() bool {
	c, ok := m.Push.(Whole)
	return ok && c.Whole()
}

// Quorum is how many of n live ranks close an iteration, if the push condition knows.
func (m Model) Quorum(n int) (least int, known bool) {
	if c, ok := m.Push.(Quorum); ok {
		return c.Quorum(n), true
	}
	return 1, false
}

// Bound is the greatest lead of the pushes of a worker that waits for its pulls, if the model bounds it.
func (m Model) Bound() (lead uint64, bounded bool) {
	if m.Tuner != nil {
		return bound(m.Tuner)
	}
	return bound(m.Pull)
}

func bound(c any) (lead uint64, bounded bool) {
	if b, ok := c.(Bounded); ok {
		return b.Bound()
	}
	return 0, false
}

func asksSignificance(c any) bool {
	s, ok := c.(Significant)
	return ok && s.AsksSignificance()
}
