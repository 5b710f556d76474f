package worker

import "fmt"

// RemoveSet takes a process set out of use that every rank of the job has removed. What is in flight on it ends with an
// error, on each of its ranks for itself: they have all heard of the removal.
func (e *Engine) RemoveSet(id uint32) {
	e.mu.Lock()
	e.removed[id] = struct{}{}
	e.lent++
	defer e.handBack()
	var ops []*operation
	for o := range e.inflight {
		if o.Set.ID == id {
			ops = append(ops, o)
		}
	}
	for name, n := range e.names {
		if name.set == id {
			e.withdraw(n.decls...)
			delete(e.names, name)
		}
	}
	e.mu.Unlock()
	for _, o := range ops {
		o.fail(fmt.Errorf("%w: %v of %q on rank %d: process set %d %v was removed while it was in flight; synchronise a set's operations before removing it",
			ErrUnsupported, o.Kind, o.name(), e.cfg.Rank, id, o.Set.Ranks))
	}
}
