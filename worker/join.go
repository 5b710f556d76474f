package worker

import (
	"cmp"
	"fmt"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/transport/wire"
)

// joinState is a join under way: this rank has no more data and waits until all have joined, or until every server has failed it.
type joinState struct {
	done    func(Output, error)
	began   time.Time
	warned  bool // that it waits
	sent    bool
	told    bool             // every server has been
	failed  error            // why it fails; nil for not
	refused map[int]struct{} // servers that have failed it
	over    bool             // it fails, whatever other servers say
	passed  bool             // the server in this process, which sums for its host, knows that all have joined
	replies map[int]int      // servers that say that all have joined, and who was the last
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
	j := &joinState{done: done, began: time.Now(), refused: map[int]struct{}{}, replies: map[int]int{}}
	e.joining = j
	e.untoldJoin.Add(1)
	idle := len(e.inflight) == e.messages.inFlight
	e.mu.Unlock()
	if idle { // else the last operation in flight sends it
		j.send(e)
	}
	e.Flush(true)
	return nil
}

// waitsForJoin warns once where a join takes long: the others may train on for hours, or hang.
func (e *Engine) waitsForJoin() {
	e.mu.Lock()
	j := e.joining
	late := j != nil && !j.warned && e.cfg.Patience.Warning > 0 && time.Since(j.began) >= e.cfg.Patience.Warning
	if late {
		j.warned = true
	}
	e.mu.Unlock()
	if late {
		e.cfg.Log.Warn(fmt.Sprintf("rank %d has joined, and has waited %.0f s for the other ranks to join", e.cfg.Rank, time.Since(j.began).Seconds()))
	}
}

// send tells all servers, once, on every connection: it must not overtake what was pushed on another.
func (j *joinState) send(e *Engine) {
	e.mu.Lock()
	sent, epoch, ways := j.sent || e.joining != j, e.epoch().Joins, e.ways() // one that has failed since tells nobody; a server that is reached later is told then (meet)
	j.sent = true
	e.mu.Unlock()
	if sent {
		return
	}
	for _, w := range ways {
		if w == nil {
			continue
		}
		if gone := w.join(wire.Header{Type: wire.TypeJoin, Epoch: epoch, Rank: uint16(e.cfg.Rank)}); gone != nil {
			e.mu.Lock()
			j.failed = cmp.Or(j.failed, gone)
			e.mu.Unlock()
		}
	}
	e.mu.Lock()
	j.told = true
	over := e.failedJoin()
	e.mu.Unlock()
	over.end(e)
}

// takeJoinBack tells the servers that sum for this host that a join has failed. Those of the job know it.
func (e *Engine) takeJoinBack() {
	if len(e.host) == 0 || e.Err() != nil {
		return
	}
	for _, w := range e.ways()[len(e.epoch().Servers):] {
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
	if j.failed != nil {
		over := e.failedJoin()
		e.mu.Unlock()
		over.end(e)
		return
	}
	first, all := -1, len(e.epoch().Servers)
	for i := range max(all, len(e.ways())) {
		if _, said := j.replies[i]; i < all && e.epoch().Servers[i].State == membership.Gone {
			continue
		} else if !said {
			pass := i >= all && !j.passed && e.hosting != nil
			j.passed = j.passed || pass
			cameLast := j.replies[first]
			e.mu.Unlock()
			if pass {
				e.hosting.AllJoined(cameLast)
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
		e.searched(false)
	}
	e.mu.Unlock()
	e.each(way.reset)
	if anew != nil {
		e.tune(anew.cfg.Start)
	}
	e.kept.reset()
	j.done(Output{Value: j.replies[first]}, nil)
	e.untoldJoin.Done()
}

// joinFails notes that a server fails a join that is under way. Every server does when a rank leaves without joining, and the join ends
// behind the last: what this rank begins next finds it back everywhere. Without a server (-1) it ends at once.
func (e *Engine) joinFails(server int, err error) {
	e.mu.Lock()
	if j := e.joining; j != nil {
		j.failed, j.over = cmp.Or(j.failed, err), j.over || server < 0
		j.refused[server] = struct{}{}
	}
	over := e.failedJoin()
	e.mu.Unlock()
	over.end(e)
}

// failedJoin takes a join out that has failed, when all have been told of it and it is over.
func (b *book) failedJoin() *joinState {
	j := b.joining
	if j == nil || j.failed == nil || j.sent && !j.told {
		return nil
	}
	servers := b.epoch().Servers
	for i := range servers {
		_, refused := j.refused[i]
		_, replied := j.replies[i]
		if !j.over && !refused && !replied && servers[i].State != membership.Gone {
			return nil
		}
	}
	b.joining = nil
	return j
}

// end is of a join that has failed, or of none.
func (j *joinState) end(e *Engine) {
	if j == nil {
		return
	}
	if j.told {
		e.takeJoinBack()
	}
	j.done(Output{}, fmt.Errorf("join on rank %d: %w", e.cfg.Rank, j.failed))
	e.untoldJoin.Done()
}
