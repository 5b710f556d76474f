package held

import (
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
)

// Tuners are those of one round, by model and process set.
type Tuners struct {
	mu  lockorder.Mutex
	all map[tuned]*tuner
}

type tuned struct {
	set   uint32
	model string
}

// NewTuners makes an empty set.
func NewTuners() *Tuners {
	s := &Tuners{all: map[tuned]*tuner{}}
	s.mu.Place(room.LevelTuners, "held.Tuners.mu")
	return s
}

// Reset forgets all tuners: their values are given up.
func (s *Tuners) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.all)
}

// of finds or makes the tuner of a model among the ranks of a process set; nil where the model needs none.
func (s *Tuners) of(set uint32, m condition.Model, log *zap.Logger) *tuner {
	if m.Tuner == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	id := tuned{set, m.Name}
	t := s.all[id]
	if t == nil {
		t = &tuner{log: log, model: m, start: time.Now(), machine: condition.NewTuning(m), seen: map[*value]uint64{}}
		t.mu.Place(room.LevelTuner, "held.tuner.mu")
		s.all[id] = t
	}
	return t
}

// tuner is the shell of a model's condition.Tuning, for all its values on this server. It watches one of them, the
// lead; another takes its place where nobody pushes that any more, as after an optimizer's end. A nil tuner does nothing.
type tuner struct {
	log   *zap.Logger
	model condition.Model
	start time.Time

	mu      lockorder.Mutex
	machine *condition.Tuning
	lead    *value
	pushes  uint64            // of the lead
	seen    map[*value]uint64 // of the others: how many of those there were when it last closed an iteration
	members []*value
}

// watch tunes a value from now on, unless that was given up, and returns whom the pull condition that holds now sets
// free. The value has the tuner already, so that its cancel finds it.
func (t *tuner) watch(v *value) []reply {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	replies, ok := v.retune(t.machine.Pull()) // under the lock, as in tune
	if !ok || slices.Contains(t.members, v) {
		return replies
	}
	t.members = append(t.members, v)
	if t.lead == nil {
		t.lead = v
	}
	return replies
}

// pushed notes a push, and whether an iteration of the value has closed with it: then the condition that follows is
// set on all values of the model.
func (t *tuner) pushed(v *value, rank int, progress uint64, closed bool) {
	if t == nil {
		return
	}
	for _, f := range t.tune(v, rank, progress, closed) {
		f.v.deliver(f.replies)
	}
}

// free is whom a new condition sets free on a value.
type free struct {
	v       *value
	replies []reply
}

func (t *tuner) tune(v *value, rank int, progress uint64, closed bool) (set []free) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v != t.lead {
		if closed {
			t.follow(v)
		}
		return nil
	}
	t.pushes++
	t.machine.Pushed(rank, progress, time.Since(t.start))
	if !closed {
		return nil
	}
	was := t.machine.Pull()
	pull, changed := t.machine.Tune()
	if !changed {
		return nil
	}
	t.log.Info("synchronisation tuned", zap.String("model", t.model.Name), zap.Stringer("from", was), zap.Stringer("to", pull))
	for _, v := range t.members { // under the lock, so that of two changes the newer one stands, and after release none
		replies, _ := v.retune(pull)
		set = append(set, free{v, replies})
	}
	return set
}

// follow notes that a value which is not the lead has closed an iteration. If the lead has not been pushed since it did so before, it takes its place.
func (t *tuner) follow(v *value) {
	before, closed := t.seen[v]
	t.seen[v] = t.pushes
	if closed && before == t.pushes && slices.Contains(t.members, v) {
		t.replaceLead(v)
	}
}

// replaceLead forgets what is known of the ranks: it counts the iterations of the one before.
func (t *tuner) replaceLead(v *value) {
	t.lead = v
	clear(t.seen)
	t.machine.Live(rankset.Set{})
}

// freed notes that a rank has got its answer.
func (t *tuner) freed(v *value, rank int) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v == t.lead {
		t.machine.Freed(rank, time.Since(t.start))
	}
}

// release stops tuning a value, whose condition the user has set or which was given up. Another becomes the lead.
func (t *tuner) release(v *value) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.members = slices.DeleteFunc(t.members, func(m *value) bool { return m == v })
	delete(t.seen, v)
	if t.lead == v {
		var next *value
		if len(t.members) > 0 {
			next = t.members[0]
		}
		t.replaceLead(next)
	}
}

// updateMembership forgets the ranks that no longer take part.
func (t *tuner) updateMembership(v *value, live rankset.Set) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v == t.lead {
		t.machine.Live(live)
	}
}
