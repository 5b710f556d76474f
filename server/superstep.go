package server

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// decider is the shell of the superstep.Decider of a group of values. It lies beside the first of them.
type decider struct {
	t     *tensor
	start time.Time

	mu      sync.Mutex
	machine *superstep.Decider
}

// reportOf is what a frame of type report says.
func reportOf(h *wire.Header, iteration wire.Report) superstep.Report {
	return superstep.Report{
		Rank: int(h.Rank), Superstep: h.Iteration, Iteration: iteration.Iteration, Interval: min(iteration.Interval, time.Hour),
		Occupancy: iteration.Occupancy, Last: h.Flags&wire.FlagLast != 0, Empty: h.Flags&wire.FlagEmpty != 0, Asks: h.Flags&wire.FlagAsk != 0,
	}
}

// report reads that an iteration has ended.
func (c *conn) report(h *wire.Header, p *room.Payload) error {
	var iteration wire.Report
	if h.Flags&wire.FlagEmpty == 0 || p.Len() > 0 {
		data, err := p.Next(p.Len())
		if err != nil {
			return err
		}
		if err := iteration.Decode(data); err != nil {
			return err
		}
	}
	return c.r.report(h, iteration)
}

// report is a rank's word that it has ended an iteration under a model with supersteps. In the frame that goes
// to the home of the first value it is for the decider.
func (r *round) report(h *wire.Header, iteration wire.Report) error {
	t, err := r.tensor(h)
	if err != nil {
		return err
	}
	if !t.Held() || t.Model.Supersteps == nil {
		return fmt.Errorf("%q has no supersteps: its model is %s", t.Name, t.Model.Name)
	}
	if h.Flags&wire.FlagEmpty != 0 {
		t.endEmpty(h)
	}
	if h.Flags&wire.FlagHome != 0 {
		t.deciding().hear(reportOf(h, iteration))
	}
	return nil
}

// endEmpty counts for the push with which the rank would have ended its superstep.
func (t *tensor) endEmpty(h *wire.Header) {
	for _, v := range t.heldParts() {
		v.deliver(v.set(condition.Push(int(h.Rank), h.Iteration, 0)))
	}
}

// deciding finds or makes the decider beside the tensor.
func (t *tensor) deciding() *decider {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.decider == nil {
		t.decider = &decider{t: t, start: time.Now(), machine: superstep.NewDecider(t.Model.Supersteps, t.Live())}
	}
	return t.decider
}

// hear takes a report to the decider.
func (d *decider) hear(in superstep.Report) {
	d.mu.Lock()
	out := d.machine.Hear(in, time.Since(d.start))
	out.Stops = append([]superstep.Stop(nil), out.Stops...)
	d.mu.Unlock()
	d.deliver(out)
}

// updateMembership takes in who still takes part: found out under the lock, as key.live does.
func (d *decider) updateMembership() {
	d.mu.Lock()
	out := d.machine.Live(d.t.Live())
	out.Stops = append([]superstep.Stop(nil), out.Stops...)
	d.mu.Unlock()
	d.deliver(out)
}

// deliver sends each rank its stop.
func (d *decider) deliver(out superstep.Outputs) {
	if out.From != out.To {
		d.t.r.s.cfg.Log.Info("thresholds follow the workers", zap.String("model", d.t.Model.Name), zap.String("tensor", d.t.Name),
			zap.Uint64("superstep", out.Superstep), zap.Stringer("from", out.From), zap.Stringer("to", out.To))
	}
	for _, s := range out.Stops {
		h := wire.Header{Type: wire.TypeStop, Tensor: d.t.ID, Iteration: s.Superstep}
		d.t.Stop(s.Rank, h, wire.Stop{Last: s.Iteration, S: s.Thresholds.S, W: s.Thresholds.W})
	}
}

// stock tells the decider beside the tensor, if there is one, who takes part now.
func (t *tensor) stock() {
	t.mu.Lock()
	d := t.decider
	t.mu.Unlock()
	if d != nil {
		d.updateMembership()
	}
}

// Report is the local worker's end of an iteration under a model with supersteps.
func (l *Local) Report(h wire.Header, iteration wire.Report) error {
	if l.r.members.Now().Classify(h.Epoch) != membership.Current {
		return nil // all ranks have joined meanwhile, and nothing is held any more
	}
	return l.r.report(&h, iteration)
}
