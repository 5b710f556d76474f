package worker

import (
	"fmt"
	"math"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/reduce"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// What a worker of an elastic job does when keys are moved from servers that stay (decision 99). It goes on with the server that it knows until that says, of
// one push, that the key is elsewhere (TypeMoved). Then it pushes again where the present epoch has the key. When it hears of the epoch it brings the last results
// of such keys there, for ranks that have not got them; and later what servers answer that have not heard of it yet.

// key is one partition of the tensor.
func (d *declaration) key(part uint32) membership.Key {
	return membership.Key{Name: membership.Name{Set: d.t.ProcessSet, Name: d.t.Name}, Number: d.t.ID, Part: int(part)}
}

// server is where a partition is pushed.
func (d *declaration) server(part int) int {
	if servers := d.moved.Load(); servers != nil {
		return (*servers)[part]
	}
	return d.placed.Servers[part]
}

// move has a partition be pushed to another server from now on.
func (d *declaration) move(part uint32, server int) {
	for {
		was := d.moved.Load()
		servers := slices.Clone(d.placed.Servers)
		if was != nil {
			servers = slices.Clone(*was)
		}
		servers[part] = server
		if d.moved.CompareAndSwap(was, &servers) {
			return
		}
	}
}

// moved handles the word of a server that the key of a push, or of what this rank has supplied, is elsewhere.
func (p *peer) moved(h *wire.Header) {
	t := p.awaiting(h)
	var r *result
	times := 0
	if t == nil {
		if r, times = p.e.kept.sentBack(keyOf{h.Tensor, h.Part}, p.index, h.Iteration); r == nil {
			return
		}
	}
	again := func() { p.supplyElsewhere(r, times) }
	if t != nil {
		again = func() { p.pushElsewhere(t) }
	}
	p.e.mu.Lock()
	begun := p.e.beside(again)
	p.e.mu.Unlock()
	if !begun && t != nil {
		t.happened(life.BreakOff)
	}
}

// pushElsewhere pushes again what a server has sent away. Until it does, the task's answer is under way, and so its memory its own.
func (p *peer) pushElsewhere(t *task) {
	t.halt()
	t.sentBack++
	to := p.newPlace(t.o.d, t.h.Part, t.sentBack)
	t.redirect(to)
	t.happened(life.BreakOff)
	for !t.begin(life.Again) {
		if s := life.State(t.state.Load()); s.Abandoned() || p.e.ctx.Err() != nil {
			return
		}
		time.Sleep(sentSoon) // the server has read it all, and this end has not noticed yet
	}
	if to != p.index {
		t.o.d.move(t.h.Part, to)
	}
	w := p.e.wayTo(to)
	w.push(t)
	w.kick(false)
}

// sentSoon is how often it is looked whether a frame that has been answered has left.
const sentSoon = 50 * time.Microsecond

// givenOf checks a frame of a server that gives a held value away, or hands a residual on, and finds the tensor; nil where it has been declared anew meanwhile. What
// passes another server can take.
func (p *peer) givenOf(h *wire.Header) (*declaration, error) {
	if !p.traffic.elastic {
		return nil, fmt.Errorf("%v sends a %v frame, in a job that is not elastic", p, h.Type)
	}
	p.e.mu.Lock()
	d := p.e.declarationOf(h.Tensor)
	p.e.mu.Unlock()
	if d == nil {
		return nil, nil
	}
	fits := int(h.Part) < len(d.t.Parts)
	switch {
	case !fits:
	case h.Type == wire.TypeResidual:
		fits = d.coding != nil && (h.Length == 0 || int(h.Length) == d.coding.answerBytes(int(h.Part)))
	case h.Type == wire.TypeSupply:
		fits = d.t.Kind == units.Accumulate && h.Codec == wire.CodecSummed && h.DType == d.t.DType && int(h.Length) == reduce.AccBytes(h.DType, int(d.t.Parts[h.Part]))
	default:
		fits = d.t.Kind == units.Accumulate
	}
	if !fits {
		return nil, fmt.Errorf("%v gives partition %d of %q away, in a %v frame with %d bytes of %v in encoding %d", p, h.Part, d.t.Name, h.Type, h.Length, h.DType, h.Codec)
	}
	return d, nil
}

// gives takes a held value that the server gives away, to be supplied to another, or what it says of a residual. The memory is the engine's.
func (p *peer) gives(d *declaration, h *wire.Header, value []byte) error {
	id, leaves := keyOf{h.Tensor, h.Part}, h.Flags&wire.FlagLast != 0
	if h.Type == wire.TypeResidual {
		p.handsOn(id, value, h.Flags)
		return nil
	}
	r, err := p.e.kept.gives(id, value)
	if err != nil {
		return fmt.Errorf("%v gives partition %d of %q away: %w", p, h.Part, d.t.Name, err)
	}
	if r != nil && !leaves { // else it is supplied to the heir, as every newest value
		p.e.later(func() { p.supplyElsewhere(r, 1) })
	}
	return nil
}

// handsOn takes a residual, or where it is empty the word that the server has the one that this rank has brought.
func (p *peer) handsOn(id keyOf, elements []byte, flags wire.Flags) {
	r := residual{elements: elements, with: -1, flags: flags & wire.FlagCopy}
	if flags&wire.FlagLast != 0 {
		r.with = p.index
	} else { // it has what is on its way there, or sends it back
		p.e.kept.arrived(id, p.index)
	}
	if len(elements) > 0 {
		p.e.kept.carry(id, r)
	}
}

// bringResiduals brings the residuals of a key, of a server that has gone, to its heir, also where this rank pushes nothing next: others do, or ask for the state.
func (e *Engine) bringResiduals(id keyOf, server int) {
	e.mu.Lock()
	d := e.declarationOf(id.tensor)
	e.mu.Unlock()
	if d == nil {
		return
	}
	to := e.succeeds(d, id.part, server)
	h := wire.Header{Type: wire.TypeResidual, DType: units.Float32, Epoch: e.epoch().Joins, Tensor: id.tensor, Part: id.part, Rank: uint16(e.cfg.Rank)}
	if d.t.Authenticated {
		h.Flags = wire.FlagAuthenticated
	}
	p := e.wayTo(to).(*peer)
	for {
		residual, flags, _ := e.kept.carried(id, to, math.MaxInt)
		if residual == nil {
			return
		}
		h := h
		h.Flags |= flags
		p.on(id.tensor+id.part, func(c *connTraffic) { p.traffic.behind(c, d, outbox.Frame{Header: h, Payload: residual}) })
	}
}

// supplyElsewhere supplies what a server has sent away so many times, or has given away.
func (p *peer) supplyElsewhere(r *result, times int) {
	p.newPlace(r.d, r.h.Part, times)
	p.e.turn <- struct{}{} // a server that is lost meanwhile is handed over before, and is not where the key is, or after, with what has been supplied to it
	defer func() { <-p.e.turn }()
	to := p.e.whereIs(r.d, r.h.Part, p.index)
	if p.e.wayTo(to) == nil { // one that has joined just now
		to = p.index
	}
	if !p.e.kept.relocate(r, p.index, to) {
		return
	}
	if other, reached := p.e.wayTo(to).(*peer); reached {
		other.supply(r)
	}
	if r.cover != nil {
		r.d.move(r.h.Part, to)
		p.e.again([]*result{r})
	}
}

// askAgain is after how long a server is asked again that has sent a frame away, because it has not heard yet that the key has come back to it; doubled each time, up to
// limit: it may be this rank that is behind, for as long as there is no scheduler.
const (
	askAgain      = 5 * time.Millisecond
	askAgainLimit = 640 * time.Millisecond
)

// newPlace waits until this rank has heard where a key is that a server has sent away so many times, and reached it. It is that server where that may be behind this rank.
func (p *peer) newPlace(d *declaration, part uint32, times int) int {
	wait := time.NewTimer(min(askAgain<<min(times-1, 10), askAgainLimit))
	defer wait.Stop()
	for {
		_, over := p.e.cfg.Membership.Watch()
		to := p.e.whereIs(d, part, p.index)
		if to != p.index {
			if p.e.met(p.e.ctx); p.e.wayTo(to) != nil {
				return to
			}
		}
		select {
		case <-over:
		case <-wait.C:
			return p.index
		case <-p.e.ctx.Done():
			return p.index
		}
	}
}

// whereIs is where a key is that was on a server, among those whose keys have not been handed over here.
func (e *Engine) whereIs(d *declaration, part uint32, server int) int {
	return e.epoch().HeirAmong(d.key(part), server, e.serves)
}

// serves reports whether the keys of a server have not been handed over here. In an elastic job every way is a peer; none leads yet to one that has just joined.
func (e *Engine) serves(server int) bool {
	p, reached := e.wayTo(server).(*peer)
	return !reached || !p.gone()
}

// bring supplies the last results of keys that have been moved to the servers where they are now.
func (e *Engine) bring() {
	began := time.Now()
	select {
	case <-e.connected:
	case <-e.ctx.Done():
		return
	}
	if e.met(e.ctx); e.ctx.Err() != nil {
		return
	}
	e.turn <- struct{}{} // beside takeovers by heirs
	defer func() { <-e.turn }()
	epoch := e.epoch()
	results := e.kept.moved(func(r *result) int {
		p, reached := e.wayTo(r.server).(*peer)
		if r.cover != nil || !reached || p.gone() || !epoch.Has(membership.Member{Role: membership.ServerRole, Number: r.server}) {
			return r.server // its heirs get it, or the server that has a held value gives it away
		}
		to := e.whereIs(r.d, r.h.Part, r.server)
		if e.wayTo(to) == nil { // the next epoch's already
			return r.server
		}
		return to
	})
	for _, r := range results {
		if p, reached := e.wayTo(r.server).(*peer); reached {
			p.supply(r)
		}
	}
	if len(results) > 0 {
		e.cfg.Log.Info("keys go on at other servers", zap.Uint32("epoch", epoch.Number), zap.Int("results supplied", len(results)), zap.Duration("took", time.Since(began)))
	}
}

// later has something be done beside what the engine does, unless that ends. The caller holds no lock.
func (e *Engine) later(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.beside(f)
}
