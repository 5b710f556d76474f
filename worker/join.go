package worker

import (
	"fmt"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/transport/wire"
)

// joinState is a join under way: this rank has no more data and waits until all have joined.
type joinState struct {
	done    func(Output, error)
	sent    bool
	replies map[int]int // servers that say that all have joined, and who was the last
}

// Join says that this rank has no more data. When every rank has joined, done is called with the last
// one, a new epoch begins, and all ranks count their operations from 0 again.
func (e *Engine) Join(done func(Output, error)) error {
	e.mu.Lock()
	if e.broken != nil {
		e.mu.Unlock()
		return e.broken
	}
	if e.joining != nil {
		e.mu.Unlock()
		return fmt.Errorf("%w: this rank has joined already and waits for the others", ErrInvalid)
	}
	j := &joinState{done: done, replies: map[int]int{}}
	e.joining = j
	idle := len(e.inflight) == e.messages.inFlight
	e.mu.Unlock()
	if idle { // else the last operation in flight sends it
		j.send(e)
	}
	e.Flush(true)
	return nil
}

// send tells all servers, once, on every connection: it must not overtake what was pushed on another.
func (j *joinState) send(e *Engine) {
	e.mu.Lock()
	sent, epoch := j.sent, e.epoch().Joins
	j.sent = true
	e.mu.Unlock()
	if sent {
		return
	}
	for _, w := range e.ways {
		if gone := w.join(wire.Header{Type: wire.TypeJoin, Epoch: epoch, Rank: uint16(e.cfg.Rank)}); gone != nil {
			e.failJoin(gone)
			return
		}
	}
}

// Joined is the word of the server in this process that all ranks have joined.
func (e *Engine) Joined(last int) { e.joined(e.epoch().Embedded(e.cfg.Rank), last) }

// joined counts the servers' words, or looks again whose are missing; the first server's says who came last, so that all ranks agree.
func (e *Engine) joined(server, last int) {
	e.mu.Lock()
	j := e.joining
	if j == nil {
		e.mu.Unlock()
		return
	}
	if server >= 0 {
		j.replies[server] = last
	}
	first := -1
	for i := range e.epoch().Servers {
		if _, said := j.replies[i]; e.epoch().Servers[i].State == membership.Gone {
			continue
		} else if !said {
			e.mu.Unlock()
			return
		}
		if first < 0 {
			first = i
		}
	}
	e.joining = nil
	e.cfg.Membership.Anew()
	e.names = map[nameID]*nameState{}
	e.disband()
	e.mu.Unlock()
	e.each(way.reset)
	e.kept.reset()
	j.done(Output{Value: j.replies[first]}, nil)
}

// failJoin ends a join that is under way.
func (e *Engine) failJoin(err error) {
	e.mu.Lock()
	j := e.joining
	e.joining = nil
	e.mu.Unlock()
	if j != nil {
		j.done(Output{}, fmt.Errorf("join on rank %d: %w", e.cfg.Rank, err))
	}
}
