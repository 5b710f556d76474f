package condition

import (
	"slices"
	"time"

	"github.com/paceline/paceline/internal/rankset"
)

// Tuning moves the pull condition of one model while training runs, by the model's Tuner. It is a pure machine. Its
// owner enters the pushes to one key of the model and their answers, because ranks reach all keys at nearly the same
// time, and sets the result of Tune on all of them. Times count from an origin of the owner's.
type Tuning struct {
	tuner   Tuner
	pull    PullCondition
	reports []Report        // of the ranks that have pushed, in rising order
	freed   []time.Duration // when each of them last got an answer, to separate waits from work
}

// NewTuning begins with the model's own pull condition. The model has a Tuner.
func NewTuning(m Model) *Tuning { return &Tuning{tuner: m.Tuner, pull: m.Pull} }

// Pull is the latest condition of Tune.
func (t *Tuning) Pull() PullCondition { return t.pull }

// Pushed records a push.
func (t *Tuning) Pushed(rank int, progress uint64, at time.Duration) {
	i, known := t.find(rank)
	if !known {
		t.reports = slices.Insert(t.reports, i, Report{Rank: rank})
		t.freed = slices.Insert(t.freed, i, at)
	} else {
		t.reports[i].Interval = max(at-t.freed[i], 1)
		t.freed[i] = at
	}
	t.reports[i].Pushed, t.reports[i].At = progress+1, at
}

// Freed records a rank's answer.
func (t *Tuning) Freed(rank int, at time.Duration) {
	if i, known := t.find(rank); known {
		t.freed[i] = at
	}
}

// Tune computes the condition for the current ranks, and reports whether it has changed. The owner calls it when an
// iteration closes: then the slowest rank has pushed, and its data are newest.
func (t *Tuning) Tune() (pull PullCondition, changed bool) {
	pull = t.tuner.Tune(t.reports)
	changed = pull != t.pull
	t.pull = pull
	return pull, changed
}

// Live forgets the ranks that have left.
func (t *Tuning) Live(live rankset.Set) {
	kept := 0
	for i, r := range t.reports {
		if live.Has(r.Rank) {
			t.reports[kept], t.freed[kept] = r, t.freed[i]
			kept++
		}
	}
	t.reports, t.freed = t.reports[:kept], t.freed[:kept]
}

func (t *Tuning) find(rank int) (int, bool) {
	return slices.BinarySearchFunc(t.reports, rank, func(r Report, rank int) int { return r.Rank - rank })
}
