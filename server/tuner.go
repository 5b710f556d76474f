package server

import (
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
)

// tuner moves the pull condition of one model while training runs, for all its values on this server. It
// watches one of them, the lead: ranks come to all of them at nearly the same times.
type tuner struct {
	r     *round
	model condition.Model
	start time.Time

	mu      sync.Mutex
	lead    *value
	ranks   map[int]*pace
	pull    condition.PullCondition
	members []*value
}

// pace is what is known of one rank.
type pace struct {
	condition.Report
	freed time.Time // when it last got an answer, so that its waits are not taken for work
}

// tunerOf finds or makes the tuner of a model and has it watch over a value; nil where the model needs none.
func (r *round) tunerOf(v *value) *tuner {
	if v.t.Model.Tuner == nil {
		return nil
	}
	r.tunersMu.Lock()
	defer r.tunersMu.Unlock()
	t := r.tuners[v.t.Model.Name]
	if t == nil {
		t = &tuner{r: r, model: v.t.Model, start: time.Now(), ranks: map[int]*pace{}, pull: v.t.Model.Pull}
		r.tuners[v.t.Model.Name] = t
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.members = append(t.members, v)
	if t.lead == nil {
		t.lead = v
	}
	return t
}

// pushed notes a push, and the condition that follows from it is set on all values of the model.
func (t *tuner) pushed(v *value, rank int, progress uint64) {
	if t == nil {
		return
	}
	now := time.Now()
	t.mu.Lock()
	if v != t.lead {
		t.mu.Unlock()
		return
	}
	p := t.ranks[rank]
	if p == nil {
		p = &pace{freed: now}
		p.Rank = rank
		t.ranks[rank] = p
	} else {
		p.Interval = max(now.Sub(p.freed), 1)
		p.freed = now
	}
	p.Pushed, p.At = progress+1, now.Sub(t.start)
	reports := make([]condition.Report, 0, len(t.ranks))
	for _, p := range t.ranks {
		reports = append(reports, p.Report)
	}
	slices.SortFunc(reports, func(a, b condition.Report) int { return a.Rank - b.Rank })
	pull := t.model.Tuner.Tune(reports)
	if pull == t.pull {
		t.mu.Unlock()
		return
	}
	was := t.pull
	t.pull = pull
	replies := make([][]reply, len(t.members))
	for i, v := range t.members { // under the lock, so that of two changes the newer one stands, and after release none
		replies[i] = v.set(condition.SetPull(pull))
	}
	members := slices.Clone(t.members)
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
	if p := t.ranks[rank]; p != nil && v == t.lead {
		p.freed = time.Now()
	}
	t.mu.Unlock()
}

// release stops tuning a value, whose condition the user has set or which was given up.
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
	}
	t.mu.Unlock()
}

// left forgets the ranks that no longer take part.
func (t *tuner) left(gone func(rank int) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for rank := range t.ranks {
		if gone(rank) {
			delete(t.ranks, rank)
		}
	}
}

// set changes a condition; the machine looks again at all who wait.
func (v *value) set(in condition.Input) []reply {
	v.mu.Lock()
	defer v.mu.Unlock()
	replies, _ := v.step(in, nil, nil, nil)
	return replies
}
