package held

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/superstep"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// decider is the shell of the superstep.Decider of a group of values. It lies beside the first of them.
type decider struct {
	t     *room.Tensor
	start time.Time

	mu      lockorder.Mutex
	machine *superstep.Decider
}

// Report notes that a rank has ended an iteration under a model with supersteps. In the frame that goes
// to the home of the first value it is for the decider.
func (x *Room) Report(h *wire.Header, iteration wire.Report) error {
	if x.t.Model.Supersteps == nil {
		return fmt.Errorf("%q has no supersteps: its model is %s", x.t.Name, x.t.Model.Name)
	}
	if x.t.Elsewhere(h.Part) {
		return nil // the rank says it where the value is, when it brings that
	}
	if h.Flags&wire.FlagEmpty != 0 {
		v, err := x.Part(h.Part)
		if errors.Is(err, inprocess.ErrCancelled) {
			return nil
		} else if err != nil {
			return err
		}
		v.excuse(int(h.Rank), h.Iteration)
	}
	if h.Flags&wire.FlagHome != 0 {
		x.deciding().hear(superstep.Report{
			Rank: int(h.Rank), Superstep: h.Iteration, Iteration: iteration.Iteration, Interval: min(iteration.Interval, time.Hour),
			Occupancy: iteration.Occupancy, Last: h.Flags&wire.FlagLast != 0, Empty: h.Flags&wire.FlagEmpty != 0, Asks: h.Flags&wire.FlagAsk != 0,
		})
	}
	return nil
}

// deciding finds or makes the decider beside the tensor.
func (x *Room) deciding() *decider {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.decider == nil {
		x.decider = &decider{t: x.t, start: time.Now(), machine: superstep.NewDecider(x.t.Model.Supersteps, x.t.Live())}
		x.decider.mu.Place(room.LevelDecider, "held.decider.mu")
	}
	return x.decider
}

// hear passes a report to the decider.
func (d *decider) hear(in superstep.Report) {
	d.mu.Lock()
	out := d.machine.Hear(in, time.Since(d.start))
	out.Stops = slices.Clone(out.Stops)
	d.mu.Unlock()
	d.deliver(out)
}

// updateMembership passes on who still takes part, found under the lock as in value.UpdateMembership.
func (d *decider) updateMembership() {
	d.mu.Lock()
	out := d.machine.Live(d.t.Live())
	out.Stops = slices.Clone(out.Stops)
	d.mu.Unlock()
	d.deliver(out)
}

// deliver sends each rank its stop.
func (d *decider) deliver(out superstep.Outputs) {
	if out.From != out.To {
		d.t.Round.Log.Info("thresholds follow the workers", zap.String("model", d.t.Model.Name), zap.String("tensor", d.t.Name),
			zap.Uint64("superstep", out.Superstep), zap.Stringer("from", out.From), zap.Stringer("to", out.To))
	}
	for _, s := range out.Stops {
		h := wire.Header{Type: wire.TypeStop, Tensor: d.t.ID, Iteration: s.Superstep}
		d.t.Shell.Stop(s.Rank, h, wire.Stop{Last: s.Iteration, Asked: s.Asked, S: s.Thresholds.S, W: s.Thresholds.W})
	}
}
