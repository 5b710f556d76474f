package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// What a worker of an elastic job does when a server is lost, alone or with the worker in its process (decisions 80 and 087). It tells the scheduler, which begins the epoch without
// the server. Then each key of the server has an heir, which every node finds by itself (membership.Epoch.Heir), and which gets from every rank
//
//  1. the last result that the rank has of the key, for ranks that have not got it; of a held value (decision 100) the newest that it has, with what that covers;
//  2. the push that the rank waits for an answer to, from the memory that it was sent from: an answer is not written there before it is whole; and what it has put for
//     an alltoall, or wants to get, until every rank has all of it; and its ends of messages (taken.go).
//
// From then on the way to the lost server leads to the heirs. A server that was drained (decision 84) is one that has said goodbye on every
// connection, behind its last answers: what it has not answered, transfers and messages too, it has dropped, and it is sent to the heirs.

// accuse tells the scheduler that a connection to the server has ended, and waits until the job goes on without the server. Where
// nothing is heard of that in time, this rank is cut off: the error is why, and who has said nothing.
func (p *peer) accuse(ctx context.Context, why error) error {
	if p.there() {
		p.e.cfg.Log.Warn("a server is lost; waiting for the scheduler's word", zap.Stringer("server", p), zap.Error(why))
		p.e.cfg.Control.ReportLost(wire.Lost{Role: wire.RoleServer, Rank: p.index, Why: why.Error(), Silent: transport.Silent(why)})
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, p.e.cfg.DeclareTimeout)
	defer cancel()
	for {
		_, over := p.e.cfg.Membership.Watch()
		if !p.there() {
			return nil
		}
		select {
		case <-over:
		case <-ctx.Done():
			return fmt.Errorf("%w; that the job goes on without it has not been heard in %v from %s", why, time.Since(began).Round(time.Millisecond), p.e.cfg.Control.Whom())
		}
	}
}

// there reports whether the server is a member.
func (p *peer) there() bool {
	return p.e.epoch().Has(membership.Member{Role: membership.ServerRole, Number: p.index})
}

// survives reports whether the job may go on without the server, where a connection to it has ended with an error.
func (p *peer) survives(err error) bool {
	return p.e.epoch().Elastic && !errors.Is(err, transport.ErrStopped)
}

// gone reports whether the way leads to the heirs.
func (p *peer) gone() bool { return p.handed.Load() }

// hand has the way lead to the heirs. The caller holds the lock.
func (p *peer) hand() {
	p.traffic.lost = true
	p.handed.Store(true)
}

// heir is the way to the heir of a task's key.
func (p *peer) heir(t *task) way {
	if t.followsResidual() {
		return p.e.wayTo(p.e.succeeds(t.o.d, t.h.Part, p.index))
	}
	return p.heirFor(t.o.d, &t.h)
}

// succeeds is the server where this rank knows a key to be from now on that was on a lost one: where the key moves, that server has to say so.
func (e *Engine) succeeds(d *declaration, part uint32, server int) int {
	to := d.server(int(part))
	if to == server || !e.serves(to) {
		to = e.heirOf(d, part, server)
		d.move(part, to)
	}
	return to
}

func (p *peer) heirFor(d *declaration, h *wire.Header) way {
	part := h.Part
	if d == asPieces { // its mailbox is that of a rank
		part = uint32(h.Destination)
	}
	return p.e.wayTo(p.e.heirOf(d, part, p.index))
}

// heirOf is the heir of a key among the servers whose keys have not been handed over here: where it is about to go itself, what goes there
// goes on with all that waits for it, in its order.
func (e *Engine) heirOf(d *declaration, part uint32, server int) int {
	there := func(i int) bool { return i != server && e.serves(i) }
	key := d.key(part)
	to := e.epoch().HeirAmong(key, server, there)
	if e.wayTo(to) == nil { // it has been moved to one that is not reached yet: where it was before sends it there
		key.Number = 0
		to = e.epoch().HeirAmong(key, server, there)
	}
	return to
}

// succeed gives the heirs of a lost server's keys, or of one that was drained, what they need.
func (e *Engine) succeed(server int, drained bool) {
	select {
	case <-e.connected:
	case <-e.ctx.Done():
		return
	}
	if e.met(e.ctx); e.ctx.Err() != nil { // its heirs may have joined just now
		return
	}
	e.turn <- struct{}{} // of one server after the other
	defer func() { <-e.turn }()
	began := time.Now()
	p := e.wayTo(server).(*peer) // as every way of an elastic job
	if drained {
		p.hearOut()
	}
	p.end()
	defer e.handBack()
	if !drained {
		e.loseResiduals(server)
	}
	results := e.kept.moved(func(r *result) int {
		if r.server != server {
			return r.server
		}
		return p.heirFor(r.d, &r.h).(*peer).index
	})
	for _, r := range results {
		e.wayTo(r.server).(*peer).supply(r)
	}
	for _, id := range e.kept.left(server, drained) {
		e.bringResiduals(id, server)
	}
	p.bringMailbox() // also of one that was drained: what was brought to it when it was the heir of another it may have dropped
	moved := 0
	for tasks := p.rest(); len(tasks) > 0; tasks = p.rest() {
		for _, t := range tasks {
			switch {
			case t.h.Type == wire.TypePiece:
				p.offerAgain(t)
			case t.begin(life.Again):
				t.halt()
				moved++
				heir := p.heir(t)
				if t.h.Type.OfMessage() {
					t.redirect(heir.(*peer).index) // where it is withdrawn
				}
				heir.push(t)
			}
		}
	}
	p.withdrawLate()
	e.again(results)
	e.conditions.fail(fmt.Sprintf("%v has gone meanwhile", p))
	e.joined(-1, 0)
	e.kick(false)
	e.cfg.Log.Info("goes on without a server", zap.Stringer("server", p), zap.Int("results supplied", len(results)), zap.Int("exchanges begun again", moved), zap.Duration("took", time.Since(began)))
}

// hearOut waits until a server has said goodbye on every connection, or the connection has ended.
func (p *peer) hearOut() {
	for _, l := range p.links {
		select {
		case <-l.heard:
		case <-p.e.ctx.Done():
		}
	}
}

// end ends the connections to a server that has gone. From now on they take no task, not even to refuse it: while they do, it cannot
// begin again, and rest would pass it over.
func (p *peer) end() {
	p.mu.Lock()
	p.traffic.ended = true
	p.mu.Unlock()
	p.close()
	p.reading.Wait()
	for _, l := range p.links { // the peer stays, as the way to its heirs
		l.scratch, l.batch = nil, wire.Batch{}
	}
	p.abandonStages()
	p.e.lend()
}

// rest takes out what still wants a server that has gone: messages in the order in which they were submitted. Where there is nothing, the
// way leads to the heirs from now on: what is submitted then does not overtake what was before.
func (p *peer) rest() []*task {
	p.mu.Lock()
	defer p.mu.Unlock()
	tasks := p.traffic.empty()
	if len(tasks) == 0 {
		p.hand()
	}
	return tasks
}

// supply sends the heir of a key a result of it, on the connection on which what is done to a held value follows.
func (p *peer) supply(r *result) {
	p.on(r.h.Tensor+r.h.Part, func(c *connTraffic) {
		for _, f := range r.frames() {
			p.traffic.behind(c, r.d, f)
		}
	})
}

// breakOff keeps a task whose answer has not come whole.
func (p *peer) breakOff(t *task) {
	t.halt()
	p.mu.Lock()
	p.traffic.unsent = append(p.traffic.unsent, t)
	p.mu.Unlock()
	t.happened(life.BreakOff)
}

// loseResiduals says how many residuals were on a lost server: the next answers are sent without what earlier ones lacked. Of held values that is the
// difference to what the ranks have.
func (e *Engine) loseResiduals(server int) {
	residuals := 0
	e.mu.Lock()
	for _, n := range e.names {
		for _, d := range n.decls {
			for part := range d.placed.Servers {
				if d.server(part) == server && d.coding != nil && (d.coding.follow || d.t.Kind != units.Accumulate && d.coding.answerBytes(part) > 0) {
					residuals++
				}
			}
		}
	}
	e.mu.Unlock()
	if residuals > 0 {
		e.cfg.Log.Warn("residuals of coded tensors are lost with a server: their next answers come without what earlier ones lacked", zap.Int("partitions", residuals), zap.Int("server", server))
	}
}
