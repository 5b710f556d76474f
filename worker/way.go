package worker

import (
	"fmt"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/transport/wire"
)

// way is how this worker reaches one server: over connections (peer), or in the same process (localQueue). What moves
// is the task's matter (core/task), what moves next the queue's.
type way interface {
	fmt.Stringer

	// mode is what the way makes of a task's life.
	mode(t *task) life.Mode
	// push queues a task, which leaves with the next kick. A caller that waits has nothing else to do, and moves large ones
	// too.
	push(t *task)
	kick(waits bool)
	// forget drops what is awaited for a task whose operation has failed.
	forget(t *task)

	// cancel tells that this rank gives a tensor up, and report of the end of an iteration with a held value. Both go
	// behind the tensor's announcement: a server leaves a cancel of an unknown tensor alone, and would keep what comes after.
	cancel(d *declaration, h wire.Header)
	report(d *declaration, h wire.Header, iteration wire.Report) error
	// undeclared tells that this rank gives up an operation whose tensor it has not declared.
	undeclared(h wire.Header, f wire.Failure)
	// withdraw tells that this rank gives up one end of a message, whose tasks are abandoned in between: what was sent of them
	// goes before, and nothing after.
	withdraw(h wire.Header, abandon func())
	// condition asks for a change of conditions; the reply goes to the engine's conditions.
	condition(w wire.Condition) error
	// left is the number of tensor bytes that have left for the server.
	left() uint64
	// join tells, behind all that was pushed, that this rank has no more data, or takes that back. The error is that of a server that has left.
	join(h wire.Header) error
	// reset forgets which tensors were announced to the server.
	reset()

	// lost and bye are the last word, of a lost peer for which this engine ends, or that it leaves. The channels are
	// closed when it is said.
	lost(l wire.Lost) []chan struct{}
	bye() []chan struct{}
	close()
}

// ways are all ways of this rank, by server index; nil to one that is not reached yet.
func (e *Engine) ways() []way {
	if ways := e.paths.Load(); ways != nil {
		return *ways
	}
	return nil
}

// wayTo is the way to a server, nil while it is not reached.
func (e *Engine) wayTo(server int) way {
	if ways := e.ways(); server < len(ways) {
		return ways[server]
	}
	return nil
}

// setWay adds a way. It reports whether this rank's join has been sent on all others.
func (e *Engine) setWay(server int, w way) (joins bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	ways := make([]way, max(len(e.ways()), server+1))
	copy(ways, e.ways())
	ways[server] = w
	e.paths.Store(&ways)
	return e.joining != nil && e.joining.sent
}

// each calls f for every server that can be reached.
func (e *Engine) each(f func(way)) {
	for _, w := range e.ways() {
		if w != nil { // it has been started
			f(w)
		}
	}
}
