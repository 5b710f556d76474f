package worker

import (
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/transport/wire"
)

// halt notes that a task has to begin again at another server.
func (t *task) halt() {
	if t.halted.IsZero() {
		t.halted = time.Now()
	}
}

// suspensionSettles is after how long the first exchange of an epoch that had to begin again stands for all others of it.
const suspensionSettles = time.Second

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
		time.AfterFunc(suspensionSettles, func() { e.logSuspension(epoch) })
	}
	s.Last = max(s.Last, after.Seconds())
	s.Worst = max(s.Worst, s.Last)
}

// logSuspension says for how long a change of servers has suspended this rank, unless another has followed.
func (e *Engine) logSuspension(epoch uint32) {
	e.mu.Lock()
	s := *e.suspension
	e.mu.Unlock()
	if s.Epoch == epoch && e.ctx.Err() == nil {
		e.cfg.Log.Info("a change of servers has suspended training here", zap.Uint32("epoch", epoch), zap.Duration("for at most", time.Duration(s.Last*float64(time.Second))))
	}
}
