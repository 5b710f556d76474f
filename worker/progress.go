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

// busiest is the tensor that has moved the most bytes, with how often it was used: in training, a gradient or a held value, so
// that this is the number of the iteration. Unnamed operations that are alike count as one tensor.
func (b *book) busiest() (name string, uses uint64) {
	var most uint64
	candidate := func(of string, used, moved uint64) {
		if moved > most || moved == most && used > uses {
			name, uses, most = of, used, moved
		}
	}
	for id, n := range b.names {
		var used, moved uint64 // a search cuts a name in several ways
		for _, d := range n.decls {
			bytes := d.next * uint64(d.offsets[len(d.t.Parts)])
			if d.unnamed {
				candidate(id.name, d.next, bytes)
			} else {
				used, moved = used+d.next, moved+bytes
			}
		}
		candidate(id.name, used, moved)
	}
	return name, uses
}
