package server

import (
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/pattern"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// condition tries or makes a change of conditions, as a worker asks (FluentPS section III-B: SetcondPull and
// SetcondPush, here for any set of tensors).
func (c *conn) condition(h *wire.Header, p *room.Payload) error {
	var w wire.Condition
	if err := decode(h, p, &w); err != nil {
		return err
	}
	c.sendJSON(wire.Header{Type: wire.TypeCondition}, c.r.condition(&w))
	return nil
}

// Condition is the in-process way of the local worker.
func (l *Local) Condition(w wire.Condition) wire.ConditionReply { return l.r.condition(&w) }

func (r *round) condition(w *wire.Condition) wire.ConditionReply {
	reply := wire.ConditionReply{ID: w.ID}
	changes, check, err := changesOf(w)
	var tensors []*tensor
	if err == nil {
		tensors, err = r.matching(w.Names, check)
	}
	if err != nil {
		reply.Error = err.Error()
		return reply
	}
	for _, t := range tensors {
		keys, pushed := t.keys.Count()
		reply.Keys += keys
		if w.Try {
			reply.Pushed = max(reply.Pushed, pushed)
			continue
		}
		for _, c := range changes {
			t.keys.Change(c)
		}
	}
	if !w.Try && reply.Keys > 0 {
		r.s.cfg.Log.Info("conditions change", zap.String("pull", w.Pull), zap.String("push", w.Push), zap.Strings("tensors", w.Names),
			zap.Int("keys", reply.Keys), zap.Uint64("from iteration", w.At))
	}
	return reply
}

// changesOf reads the conditions. check says whether they fit a tensor.
func changesOf(w *wire.Condition) (changes []room.Change, check func(*tensor) error, err error) {
	if n := max(len(w.Pull), len(w.Push)); n > limits.MaxSync {
		return nil, nil, fmt.Errorf("a condition of %d bytes, limit %d", n, limits.MaxSync)
	}
	pull, push := condition.BSP(), condition.BSP()
	if w.Pull != "" {
		if pull, err = condition.Parse(w.Pull); err != nil {
			return nil, nil, err
		}
		changes = append(changes, room.ChangeTo(pull, true, w.At))
	}
	if w.Push != "" {
		if push, err = condition.Parse(w.Push); err != nil {
			return nil, nil, err
		}
		changes = append(changes, room.ChangeTo(push, false, w.At))
	}
	if pull.Supersteps != nil || push.Supersteps != nil {
		return nil, nil, fmt.Errorf("%s%s has supersteps, which cannot begin while training runs", w.Pull, w.Push)
	}
	return changes, func(t *tensor) error {
		if t.Model.Supersteps != nil {
			return fmt.Errorf("tensor %q has supersteps under %s, so that its conditions stay", t.Name, t.Model.Name)
		}
		if len(t.Hosts) > 0 {
			return fmt.Errorf("tensor %q is summed on the hosts first, so that its conditions stay: declare it under bsp, or set PACELINE_HOST_SUMS=0", t.Name)
		}
		if pull.Traits().Significance && !t.Model.Traits().Significance {
			return fmt.Errorf("tensor %q: %s reads the significance of pushes, which optimizers do not send under %s: declare it under a model that reads it", t.Name, w.Pull, t.Model.Name)
		}
		m := condition.Model{Name: w.Pull, Pull: pull.Pull, Tuner: pull.Tuner, Push: push.Push}
		if err := m.Check(t.Dataflow()); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		if err := m.CheckWorkers(len(t.Ranks)); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
		if !push.Whole() && t.Dataflow() == condition.Aggregate && (!t.Whole || t.Round.Elastic && t.Model.Whole()) {
			return fmt.Errorf("tensor %q is summed of all ranks, so that no rank can be left out: declare it under drop-stragglers:%d to change its push condition later", t.Name, len(t.Ranks))
		}
		return nil
	}, nil
}

// matching finds the tensors whose names fit, but for those that were given up: their counts of iterations are over.
func (r *round) matching(patterns []string, check func(*tensor) error) ([]*tensor, error) {
	for _, p := range patterns {
		if err := pattern.Check(p); err != nil {
			return nil, err
		}
	}
	fits := func(t *tensor) bool {
		if len(patterns) == 0 {
			return t.Dataflow() == condition.Accumulate || t.Sync.Model != ""
		}
		return slices.ContainsFunc(patterns, func(p string) bool { return pattern.Match(p, t.Name) })
	}
	var tensors []*tensor
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, t := range r.tensors {
		if !t.Kind.HasOp() || t.GivenUp() || !fits(t) {
			continue
		}
		if err := check(t); err != nil {
			return nil, err
		}
		tensors = append(tensors, t)
	}
	return tensors, nil
}
