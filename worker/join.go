package worker

import (
	"cmp"
	"fmt"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/transport/wire"
)

// joinState is a join under way: this rank has no more data and waits until all have joined.
type joinState struct {
	done    func(Output, error)
	sent    bool
	told    bool        // every server has been
	failed  error       // meanwhile; nil for not
	passed  bool        // the server in this process, which sums for its host, knows that all have joined
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
	var gone error
	for _, w := range e.ways {
		if gone = w.join(wire.Header{Type: wire.TypeJoin, Epoch: epoch, Rank: uint16(e.cfg.Rank)}); gone != nil {
			break
		}
	}
	e.mu.Lock()
	j.told = true
	failed := cmp.Or(j.failed, gone)
	e.mu.Unlock()
	if failed != nil {
		e.failJoin(failed)
	}
}

// takeJoinBack tells the servers that sum for this host that a join has failed. Those of the job know it.
func (e *Engine) takeJoinBack() {
	if len(e.host) == 0 || e.Err() != nil {
		return
	}
	for _, w := range e.ways[len(e.epoch().Servers):] {
		_ = w.join(wire.Header{Type: wire.TypeJoin, Flags: wire.FlagOwnWill, Epoch: e.epoch().Joins, Rank: uint16(e.cfg.Rank)}) // one that has left ends the engine
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
	first, all := -1, len(e.epoch().Servers)
	for i := range e.ways {
		if _, said := j.replies[i]; i < all && e.epoch().Servers[i].State == membership.Gone {
			continue
		} else if !said {
			pass := i >= all && !j.passed && e.hosting != nil
			j.passed = j.passed || pass
			e.mu.Unlock()
			if pass {
				e.hosting.AllJoined(j.replies[first])
			}
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
	anew := e.tuner
	if anew != nil {
		anew = searching(anew.cfg)
		e.tuner = anew
	}
	e.mu.Unlock()
	e.each(way.reset)
	if anew != nil {
		e.tune(anew.cfg.Start)
	}
	e.kept.reset()
	j.done(Output{Value: j.replies[first]}, nil)
}

// failJoin ends a join that is under way, behind the telling of it: what this rank begins next comes to every server behind that.
func (e *Engine) failJoin(err error) {
	e.mu.Lock()
	j := e.joining
	if j != nil && j.sent && !j.told {
		j.failed = cmp.Or(j.failed, err)
		j = nil
	} else {
		e.joining = nil
	}
	e.mu.Unlock()
	if j == nil {
		return
	}
	if j.told {
		e.takeJoinBack()
	}
	j.done(Output{}, fmt.Errorf("join on rank %d: %w", e.cfg.Rank, err))
}
