package worker

import (
	"context"

	"github.com/paceline/paceline/transport/wire"
)

// What a worker of an elastic job does when a server has joined it (decision 86). It connects to it beside what it does. What the scheduler places there, and what
// it inherits, waits until that is done.

// meet connects to a server that has joined. One that cannot be reached is lost, or this rank is, as the scheduler decides.
func (e *Engine) meet(server int, met chan struct{}) {
	defer func() {
		e.mu.Lock()
		delete(e.meeting, server)
		e.mu.Unlock()
		close(met)
	}()
	select {
	case <-e.connected:
	case <-e.ctx.Done():
		return
	}
	e.encoder.reach(server + 1)
	if e.wayTo(server) != nil { // it has joined while this rank connected to all
		return
	}
	p := newPeer(e, server, e.epoch().Servers[server])
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.PeerTimeout) // what moves to it waits, and so does the job
	defer cancel()
	ctx, cancel = p.whileThere(ctx)
	defer cancel()
	if p.there() {
		err := p.connect(ctx)
		if err != nil && e.ctx.Err() == nil {
			err = p.accuse(e.ctx, err)
			if err != nil {
				p.fail(err, err.Error())
			}
		}
	}
	if joins := e.setWay(server, p); joins {
		_ = p.join(wire.Header{Type: wire.TypeJoin, Epoch: e.epoch().Joins, Rank: uint16(e.cfg.Rank)}) // one that has left is lost too, and nobody waits for its word
	}
	p.catchUp()
	p.kick(false)
}

// whileThere is ctx until the server is no member any more: one of an elastic job may be lost before it answers. Of other jobs, which end
// with a loss, some servers are no members: a host's, for its sums.
func (p *peer) whileThere(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if !p.e.epoch().Elastic {
		return ctx, cancel
	}
	go func() {
		defer cancel()
		for {
			_, over := p.e.cfg.Membership.Watch()
			if !p.there() {
				return
			}
			select {
			case <-over:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, cancel
}

// met waits until every server that has joined is reached, or lost, or ctx ends.
func (e *Engine) met(ctx context.Context) {
	for {
		e.mu.Lock()
		var next chan struct{}
		for _, next = range e.meeting {
			break
		}
		e.mu.Unlock()
		if next == nil {
			return
		}
		select {
		case <-next:
		case <-ctx.Done():
			return
		}
	}
}
