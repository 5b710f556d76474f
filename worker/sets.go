package worker

import (
	"context"
	"fmt"

	"github.com/paceline/paceline/internal/units"
)

// RemoveSet removes a process set, as every rank of the job does, and waits until all have. The set is out of use from the call
// on, because what is declared on it may reach the scheduler behind the removal. What is in flight on it ends with an error, on
// each of its ranks for itself: they have all heard of the removal.
func (e *Engine) RemoveSet(ctx context.Context, id uint32) error {
	e.mu.Lock()
	_, before := e.removed[id]
	e.removed[id] = struct{}{}
	e.mu.Unlock()
	if err := e.cfg.Control.RemoveSet(ctx, id); err != nil {
		e.mu.Lock()
		if !before {
			delete(e.removed, id)
		}
		e.mu.Unlock()
		return err
	}
	e.mu.Lock()
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
		o.fail(e.removal(o.Kind, o.name(), id, o.Set.Ranks))
	}
	return nil
}

// removal is the error of an operation whose process set was removed.
func (b *book) removal(kind units.Kind, name string, set uint32, ranks []int) error {
	return fmt.Errorf("%w: %v of %q on rank %d: process set %d %v was removed while it was in flight; synchronise a set's operations before removing it",
		ErrUnsupported, kind, name, b.cfg.Rank, set, ranks)
}
