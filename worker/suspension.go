package worker

import (
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// halt notes that a task has to begin again at another server.
func (t *task) halt() {
	if t.halted.IsZero() {
		t.halted = time.Now()
	}
}

// resumed notes that a task has its answer, so long after it was halted.
func (e *Engine) resumed(after time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.suspension == nil {
		e.suspension = &wire.Suspension{}
	}
	s, epoch := e.suspension, e.epoch().Number
	if s.Epoch != epoch {
		s.Epoch, s.Last = epoch, 0
	}
	s.Last = max(s.Last, after.Seconds())
	s.Worst = max(s.Worst, s.Last)
}
