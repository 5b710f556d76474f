package worker

import (
	"cmp"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/internal/units"
)

// watch bounds what this rank waits for by its own clock, until the engine ends. It looks at all operations in flight now
// and then, so that an operation costs nothing for it.
func (e *Engine) watch() {
	ticks.Until(e.ctx.Done(), agreement.Every(e.cfg.Patience.Warning, e.cfg.Patience.Shutdown), func(time.Time) { e.look() })
}

// look warns of operations that wait long for servers, and gives up those that wait too long. One that waits for its
// declaration has the deadline of that, and one that is held back those of the operations before it. A server that then keeps what it was lent is
// given up itself.
func (e *Engine) look() {
	ways := e.ways()
	left := make([]uint64, len(ways))
	for i, w := range ways {
		if w != nil {
			left[i] = w.left()
		}
	}
	e.waitsForJoin()
	defer e.handBack()
	var waits []*task
	for _, o := range e.operations() {
		var progress uint64
		var abandoned bool
		progress, waits, abandoned = o.standing(left, waits[:0])
		if len(waits) == 0 {
			continue
		}
		patience := o.patience()
		if abandoned { // servers answer that at once
			patience.Warning, patience.Shutdown = 0, cmp.Or(patience.Shutdown, e.cfg.DeclareTimeout)
		}
		waited, warn, end := o.wait.Look(patience, progress, e.warnedOf(o), time.Since(e.origin))
		switch {
		case end && abandoned:
			if p, ok := e.wayTo(waits[0].at()).(*peer); ok {
				p.fail(nil, fmt.Sprintf("it runs, but keeps memory of %q, which rank %d has given up, for %v", o.name(), e.cfg.Rank, waited.Round(time.Millisecond)))
				return
			}
		case end && o.Kind.Message():
			o.giveUp(because{ErrStall, fmt.Sprintf("%s on rank %d stalled: it has waited %v for %s, longer than PACELINE_STALL_SHUTDOWN (%v)",
				o.what(), e.cfg.Rank, waited.Round(time.Millisecond), o.waitsFor(), e.cfg.Patience.Shutdown)})
		case end:
			o.giveUp(because{ErrStall, fmt.Sprintf("%q stalled: %v on rank %d has waited %v for %s, which runs but has not answered within PACELINE_STALL_SHUTDOWN (%v)",
				o.name(), o.Kind, e.cfg.Rank, waited.Round(time.Millisecond), e.serversOf(waits), e.cfg.Patience.Shutdown)})
		case warn && o.Kind.Message():
			e.warns(o.name())
			e.cfg.Log.Warn(fmt.Sprintf("%s has waited %.0f s for %s", o.what(), waited.Seconds(), o.waitsFor()))
		case warn:
			e.warns(o.name())
			e.cfg.Log.Warn(fmt.Sprintf("%q has waited %.0f s for %s, which has not answered", o.name(), waited.Seconds(), e.serversOf(waits)), zap.Stringer("kind", o.Kind))
		}
	}
}

// answerTime is for how long an operation whose timeout has passed waits for its home server, which usually answers at once.
const answerTime = time.Second

// expire ends an operation whose own timeout has passed. The home server of its name knows which ranks did not come: it is asked, and
// ends the operation on every rank, this one too. Where it does not answer, the operation ends without that.
func (o *operation) expire() {
	waits := "its end"
	if o.Kind.Message() {
		waits = o.waitsFor()
	}
	err := because{ErrStall, fmt.Sprintf("%s on rank %d has waited %v for %s, its timeout", o.what(), o.e.cfg.Rank, o.Timeout, waits)}
	if !o.askHome(err.text) {
		o.giveUp(err)
	}
}

// askHome has the home server end the operation on every rank, with the ranks that did not come. It reports false where the operation has no home yet,
// none any more, or has asked before.
func (o *operation) askHome(text string) bool {
	if o.d == nil || o.beside || o.Kind == units.Accumulate {
		return false
	}
	o.mu.Lock()
	again := o.asked || o.abandoned || o.err != nil
	o.asked = true
	o.mu.Unlock()
	if again {
		return false
	}
	o.e.mu.Lock()
	known, timer := o.d.t.ID != 0 && o.d.state == declareDone, o.timer
	o.e.mu.Unlock()
	if !known {
		return false
	}
	home := o.e.wayTo(o.d.server(0))
	if home == nil {
		return false
	}
	timer.Reset(answerTime)
	h, f := o.failure(reason{units.FailStall, text})
	f.Late = true
	home.undeclared(h, f)
	return true
}

// warnedOf is when anybody last warned of an operation's name, negative for never.
func (e *Engine) warnedOf(o *operation) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if at, ok := e.warned[o.name()]; ok {
		return at.Sub(e.origin)
	}
	return -1
}

// warns notes that somebody knows why an operation waits, and reports whether it was said shortly before. It is said again after a while, however often it is heard.
func (e *Engine) warns(name string) (again bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	e.warned[name] = now
	if again = now.Sub(e.said[name]) < sameStall; !again {
		e.said[name] = now
	}
	return again
}

// standing is how far an operation has come, as a number that changes with it, the tasks that servers still have to
// answer, appended to waits, and whether it has been given up. What waits behind others comes further with them.
func (o *operation) standing(left []uint64, waits []*task) (progress uint64, _ []*task, abandoned bool) {
	o.mu.Lock()
	tasks, abandoned := o.tasks, o.abandoned
	o.mu.Unlock()
	if abandoned {
		progress = 1 << 63 // its tasks may not know yet: servers have from now on to let go, not from when it began
	}
	for _, t := range tasks {
		s := life.State(t.state.Load())
		progress += uint64(s)
		if s.Settled() {
			continue
		}
		waits = append(waits, t)
		if !s.Left() || o.Kind == units.Receive {
			if at := t.at(); at < len(left) { // else it has joined since
				progress += left[at]
			}
		}
	}
	return progress, waits, abandoned
}
