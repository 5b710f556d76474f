package worker

import (
	"time"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// profiler measures how fast this rank exchanges tensors with each server, and tells the scheduler now and then (PSLD section 4.1,
// decisions 94 and 101). The server in this process is left out: no link leads there. Nil measures nothing.
type profiler struct {
	e   *Engine
	own int // index of the server in this process; -1 for none

	mu      lockorder.Mutex
	servers []measured // by index
}

// measured is what was measured of one server.
type measured struct {
	meter placement.Meter    // of the iteration that runs
	fit   placement.Fit      // to those that have ended since the newest report
	keys  map[keyOf]struct{} // of the iteration's exchanges: with the next one of any of them another iteration begins
}

// longestIteration bounds the exchanges that count as one iteration, where no key comes again.
const longestIteration = 4096

func newProfiler(e *Engine) *profiler {
	if e.cfg.Profiles == 0 {
		return nil
	}
	p := &profiler{e: e, own: e.epoch().Embedded(e.cfg.Rank)}
	p.mu.Place(levelWorker, "profiler")
	return p
}

// moved notes when a frame goes to its connection. The peer's lock is held.
func (p *profiler) moved(f *outbox.Frame) {
	if t, ok := f.Owner.(*task); ok && p != nil && t.answer {
		t.begun = time.Now()
	}
}

// answered counts an exchange whose answer is here. What is empty has had no bytes to move; of rows each rank has its own number.
func (p *profiler) answered(t *task, server int, h *wire.Header) {
	if p == nil || t.rows != nil || t.h.Type != wire.TypePush && t.h.Type != wire.TypePull || t.h.Flags&wire.FlagDeclare != 0 ||
		(t.h.Flags|h.Flags)&wire.FlagEmpty != 0 || server == p.own || p.e.ofHost(server) {
		return
	}
	x := placement.Exchange{Bytes: uint64(t.o.d.t.Parts[t.h.Part]), Begun: t.begun.Sub(p.e.origin), Ended: time.Since(p.e.origin), Wait: h.Waited()}
	if t.h.Type == wire.TypePull { // one way alone
		x.Bytes /= 2
	}
	p.add(server, keyOf{t.h.Tensor, t.h.Part}, x)
}

func (p *profiler) add(server int, key keyOf, x placement.Exchange) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for server >= len(p.servers) {
		p.servers = append(p.servers, measured{keys: map[keyOf]struct{}{}})
	}
	m := &p.servers[server]
	if _, again := m.keys[key]; again || len(m.keys) == longestIteration {
		if bytes, seconds, ok := m.meter.End(); ok {
			m.fit.Add(bytes, seconds)
		}
		clear(m.keys)
	}
	m.keys[key] = struct{}{}
	m.meter.Add(x)
}

// take is what was measured since the last call.
func (p *profiler) take() (samples []wire.Sample) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.servers {
		m := &p.servers[i]
		if s, ok := m.fit.Sample(); ok && s.Bytes > 0 && s.Seconds > 0 {
			samples = append(samples, wire.Sample{Server: i, Alpha: s.Alpha, Beta: s.Beta, Bytes: s.Bytes, Seconds: s.Seconds, Error: s.Error})
		}
		m.fit = placement.Fit{}
	}
	return samples
}

// reports tells the scheduler what was measured, until the engine ends.
func (e *Engine) reports() {
	ticks.Until(e.ctx.Done(), e.cfg.Profiles, func(time.Time) {
		if samples := e.profiler.take(); len(samples) > 0 {
			e.cfg.Control.ReportProfile(wire.Profile{Round: e.epoch().Round, Servers: samples})
		}
	})
}
