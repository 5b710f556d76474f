package server

import (
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/rankset"
)

// tuner is the shell of a model's condition.Tuning, for all its values on this server. It watches one of them, the
// lead.
type tuner struct {
	r     *round
	model condition.Model
	start time.Time

	mu      sync.Mutex
	machine *condition.Tuning
	lead    *value
	members []*value
}

// tune has the tuner of a model watch over a value, and gives it and the pull condition that holds now; nil where the
// model needs none.
func (r *round) tune(m condition.Model, v *value) (*tuner, condition.PullCondition) {
	if m.Tuner == nil {
		return nil, m.Pull
	}
	r.tunersMu.Lock()
	defer r.tunersMu.Unlock()
	t := r.tuners[m.Name]
	if t == nil {
		t = &tuner{r: r, model: m, start: time.Now(), machine: condition.NewTuning(m)}
		r.tuners[m.Name] = t
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.members = append(t.members, v)
	if t.lead == nil {
		t.lead = v
	}
	return t, t.machine.Pull()
}

// pushed notes a push, and whether an iteration of the value has closed with it: then the condition that follows is
// set on all values of the model.
func (t *tuner) pushed(v *value, rank int, progress uint64, closed bool) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if v != t.lead {
		t.mu.Unlock()
		return
	}
	t.machine.Pushed(rank, progress, time.Since(t.start))
	was := t.machine.Pull()
	pull, changed := was, false
	if closed {
		pull, changed = t.machine.Tune()
	}
	if !changed {
		t.mu.Unlock()
		return
	}
	members := slices.Clone(t.members)
	replies := make([][]reply, len(members))
	for i, v := range members { // under the lock, so that of two changes the newer one stands, and after release none
		replies[i] = v.retune(pull)
	}
	t.mu.Unlock()
	t.r.s.cfg.Log.Info("synchronisation tuned", zap.String("model", t.model.Name), zap.Stringer("from", was), zap.Stringer("to", pull))
	for i, v := range members {
		v.deliver(replies[i])
	}
}

// freed notes that a rank has got its answer.
func (t *tuner) freed(v *value, rank int) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if v == t.lead {
		t.machine.Freed(rank, time.Since(t.start))
	}
	t.mu.Unlock()
}

// release stops tuning a value, whose condition the user has set or which was given up. Another becomes the lead, and
// what is known of the ranks, which counts the iterations of the one before, is forgotten.
func (t *tuner) release(v *value) {
	if t == nil {
		return
	}
	t.mu.Lock()
	t.members = slices.DeleteFunc(t.members, func(m *value) bool { return m == v })
	if t.lead == v {
		t.lead = nil
		if len(t.members) > 0 {
			t.lead = t.members[0]
		}
		t.machine.Live(rankset.Set{})
	}
	t.mu.Unlock()
}

// updateMembership forgets the ranks that no longer take part.
func (t *tuner) updateMembership(v *value, live rankset.Set) {
	if t == nil {
		return
	}
	t.mu.Lock()
	if v == t.lead {
		t.machine.Live(live)
	}
	t.mu.Unlock()
}

// retune sets the pull condition that a tuner has found: from the iteration on from which the tuner's model holds.
func (v *value) retune(pull condition.PullCondition) []reply {
	v.mu.Lock()
	defer v.mu.Unlock()
	in := condition.SetPull(pull)
	if v.machine.V() >= v.tuned {
		replies, _ := v.step(in, nil, nil, nil)
		return replies
	}
	v.changes.Add(v.tuned, in)
	return nil
}

// set changes a condition; the machine looks again at all who wait.
func (v *value) set(in condition.Input) []reply {
	v.mu.Lock()
	defer v.mu.Unlock()
	replies, _ := v.step(in, nil, nil, nil)
	return replies
}
