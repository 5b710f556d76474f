package worker

import (
	"time"

	"github.com/paceline/paceline/transport/wire"
)

// Progress is how far this rank is, for people. It is gathered when somebody asks, from counts that are there.
func (e *Engine) Progress() wire.Progress {
	p := wire.Progress{Seconds: time.Since(e.origin).Seconds()}
	e.mu.Lock()
	p.Operations, p.Bytes, p.InFlight = e.over.operations, e.over.bytes, len(e.inflight)
	p.Tensor, p.Iteration = e.busiest()
	p.Tuning = e.tuner.progress()
	if e.suspension != nil {
		suspension := *e.suspension
		p.Suspension = &suspension
	}
	e.mu.Unlock()
	e.each(func(w way) {
		p.Sent += w.left()
	})
	return p
}

// over counts the operations that have ended.
type over struct{ operations, bytes uint64 }

// busiest is the named tensor that has moved the most bytes, with how often it was used: in training, a gradient or
// a held value, so that this is the number of the iteration.
func (b *book) busiest() (name string, uses uint64) {
	var most uint64
	for id, n := range b.names {
		var used, moved uint64 // a search cuts a name in several ways
		for _, d := range n.decls {
			if !d.unnamed {
				used, moved = used+d.next, moved+d.next*uint64(d.offsets[len(d.t.Parts)])
			}
		}
		if moved > most || moved == most && used > uses {
			name, uses, most = id.name, used, moved
		}
	}
	return name, uses
}
