package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// declareQueue declares tensors at the scheduler, all that wait together in one request.
type declareQueue struct {
	wake   chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
}

func (q *declareQueue) start(e *Engine) {
	ctx, cancel := context.WithCancel(context.Background())
	q.wake, q.cancel, q.done = make(chan struct{}, 1), cancel, make(chan struct{})
	go q.run(ctx, e)
}

// stop ends the requests; what waits for them fails.
func (q *declareQueue) stop(e *Engine, err error) {
	q.cancel()
	<-q.done
	batch, _ := e.declaring()
	for _, d := range batch {
		e.declared(d, wire.Placed{}, err)
	}
}

// kick sees to it that what the book has to be declared is.
func (q *declareQueue) kick() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

func (q *declareQueue) run(ctx context.Context, e *Engine) {
	defer close(q.done)
	for {
		select {
		case <-q.wake:
			q.send(ctx, e)
		case <-ctx.Done():
			return
		}
	}
}

func (q *declareQueue) send(ctx context.Context, e *Engine) {
	batch, tensors := e.declaring()
	if len(batch) == 0 {
		return
	}
	asking, cancel := context.WithTimeout(ctx, e.cfg.DeclareTimeout)
	defer cancel()
	for i := range q.ask(ctx, asking, e, batch, tensors) {
		q.ask(ctx, asking, e, batch[i:i+1], tensors[i:i+1])
	}
}

// ask declares tensors together; ctx ends with the queue, asking at the deadline. It returns those of several that the scheduler has refused together, for one of them, and
// which are to be asked for one by one.
func (q *declareQueue) ask(ctx, asking context.Context, e *Engine, batch []*declaration, tensors []wire.Tensor) (refused []*declaration) {
	placed, err := e.cfg.Control.Declare(asking, tensors)
	if len(batch) > 1 && errors.As(err, new(*control.RefusedError)) {
		return batch
	}
	if err == nil && len(placed) != len(batch) {
		err = fmt.Errorf("the scheduler placed %d of %d tensors", len(placed), len(batch))
	}
	if err == nil {
		e.met(ctx) // it may have placed them on servers that have joined just now
		err = ctx.Err()
	}
	if broken := e.Err(); err != nil && broken != nil {
		err = broken // why the request was given up says more than that it was
	} else if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: %w", ErrStall, err)
	}
	for i, d := range batch {
		switch {
		case err != nil:
			e.declared(d, wire.Placed{}, err)
		case len(placed[i].Servers) != len(d.t.Parts) || !e.knownServers(placed[i].Servers):
			e.declared(d, wire.Placed{}, fmt.Errorf("the scheduler placed %q on servers %v", d.t.Name, placed[i].Servers))
		default:
			e.declared(d, placed[i], nil)
		}
	}
	return nil
}

// declaring removes from the book what is to be declared.
func (e *Engine) declaring() (batch []*declaration, tensors []wire.Tensor) {
	e.mu.Lock()
	defer e.mu.Unlock()
	batch, e.undeclared = e.undeclared, nil
	for _, d := range batch {
		d.state = declareAsked
		tensors = append(tensors, d.t)
	}
	return batch, tensors
}

func (e *Engine) knownServers(servers []int) bool {
	return !slices.ContainsFunc(servers, func(s int) bool { return s < 0 || s >= len(e.epoch().Servers) })
}

// declared lets the operations go that waited for the declaration. Other ranks that have declared theirs hear that this one has not, but
// where they know it otherwise: from the end of this engine, or the removal of the process set.
func (e *Engine) declared(d *declaration, p wire.Placed, err error) {
	fail := (*operation).giveUp
	e.mu.Lock()
	if e.broken != nil {
		fail = (*operation).fail
	}
	if err != nil {
		d.state, d.err = declareFailed, fmt.Errorf("%q could not be declared on rank %d: %w", d.t.Name, e.cfg.Rank, err)
		if _, removed := e.removed[d.t.ProcessSet]; removed && e.broken == nil {
			fail = (*operation).fail
			d.err = e.removal(d.t.Kind, d.t.Name, d.t.ProcessSet, d.t.Ranks)
		}
		if n := e.names[nameID{d.t.ProcessSet, d.t.Name}]; n != nil {
			n.drop(d)
		}
	} else {
		d.t.ID = p.ID
		if d.host != nil {
			d.t.Servers = p.Servers
		}
		d.placed, d.state = e.place(d, p), declareDone
		e.lead(d)
	}
	waiting := d.waiting
	d.waiting = nil
	e.mu.Unlock()
	for _, o := range waiting {
		if d.err != nil {
			fail(o, d.err)
		}
		o.launch()
	}
}

// place adds a declaration to the keys of the epoch, unless its name has failed meanwhile.
func (b *book) place(d *declaration, p wire.Placed) *membership.Tensor {
	name := membership.Name{Set: d.t.ProcessSet, Name: d.t.Name}
	t := &membership.Tensor{Number: p.ID, Name: name, Parts: d.t.Parts, Servers: p.Servers}
	if n := b.names[nameID{name.Set, name.Name}]; n != nil && n.Generation() == d.t.Generation {
		b.epoch().Keys.Put(t)
	}
	return t
}

// drop forgets a declaration, so that the next use declares anew.
func (n *nameState) drop(d *declaration) {
	if n.last == d {
		n.last = nil
	}
	n.decls = slices.DeleteFunc(n.decls, func(other *declaration) bool { return other == d })
}
