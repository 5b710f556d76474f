package server

import (
	"errors"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// errRemoved is of a frame about a tensor whose process set was removed: its rank has not heard of that yet.
var errRemoved = errors.New("its process set was removed")

// removals are the process sets of a round that every worker has removed, and their tensors, of which frames may still
// come. It is guarded by the round's lock.
type removals struct {
	sets    map[uint32]struct{}
	tensors map[uint32]struct{}
}

func newRemovals() removals {
	return removals{sets: map[uint32]struct{}{}, tensors: map[uint32]struct{}{}}
}

// has reports whether a tensor is of a removed set.
func (m *removals) has(t *wire.Tensor) bool {
	_, removed := m.sets[t.ProcessSet]
	if removed {
		m.add(t.ID)
	}
	return removed
}

// add notes a tensor of a removed set. Of very many the earlier ones are forgotten: their ranks have long heard.
func (m *removals) add(tensor uint32) {
	if len(m.tensors) >= limits.MaxTensors {
		clear(m.tensors)
	}
	m.tensors[tensor] = struct{}{}
}

// removeSet forgets the tensors of a process set. Ranks end the operations that are in flight by themselves.
func (r *round) removeSet(set uint32) {
	var tensors []*tensor
	r.mu.Lock()
	r.removals.sets[set] = struct{}{}
	for id, t := range r.tensors {
		if t.ProcessSet == set {
			tensors = append(tensors, t)
			delete(r.tensors, id)
			r.removals.add(id)
		}
	}
	r.mu.Unlock()
	for _, t := range tensors {
		r.drop(t, 0)
		r.s.pool.Refund(costOf(&t.Tensor.Tensor))
	}
	r.names.step(func(h *agreement.Home) { h.Forget(set) })
}
