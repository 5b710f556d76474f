package server

import (
	"fmt"
	"sync"
	"time"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// tensor is an announced tensor: its keys as far as they lie on this server.
type tensor struct {
	*room.Tensor
	r         *round
	ranks     rankset.Set
	signature string
	agreed    *agreement.Tensor

	mu      sync.Mutex
	keys    map[uint32]*key   // of what is summed
	values  map[uint32]*value // of what is held
	decider *decider          // of supersteps; nil where another tensor has it, or the model has none

	forgotten sync.Map // rank → count of the newest operation on a held value that it has given up
}

// newTensor takes in what a rank says of a tensor.
func newTensor(r *round, t *wire.Tensor) (*tensor, error) {
	n := &tensor{r: r, signature: t.Signature(), keys: map[uint32]*key{}, values: map[uint32]*value{}}
	var err error
	if n.Tensor, err = room.NewTensor(t, &r.settings, n); err != nil {
		return nil, err
	}
	n.ranks = n.Members
	n.agreed = agreed(n)
	return n, nil
}

// key finds or makes the key of one partition.
func (t *tensor) key(part uint32) (*key, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.keys[part]; k != nil {
		return k, nil
	}
	if t.Kind.HasRoot() || t.Held() {
		return nil, fmt.Errorf("%q is a %v, which sums nothing", t.Name, t.Kind)
	}
	m, err := t.machine(part, condition.Aggregate)
	if err != nil {
		return nil, err
	}
	k := &key{decided: decided{t: t, part: part, bytes: int(t.Parts[part]), coding: t.coding(part), machine: m}, slots: map[uint64]*slot{}}
	t.keys[part] = k
	return k, nil
}

// machine makes the machine of one partition.
func (t *tensor) machine(part uint32, flow condition.Dataflow) (*condition.Machine, error) {
	if part >= uint32(len(t.Parts)) {
		return nil, fmt.Errorf("partition %d of %q, which has %d", part, t.Name, len(t.Parts))
	}
	c := condition.Config{Live: t.Live(), Model: t.Model, Dataflow: flow}
	if t.Sync.SoftPark {
		c.Parking = condition.SoftBarrier
	}
	m, err := condition.New(c)
	if err != nil {
		return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	return m, nil
}

func (t *tensor) cells() []cell {
	t.mu.Lock()
	defer t.mu.Unlock()
	cells := make([]cell, 0, len(t.keys)+len(t.values))
	for _, k := range t.keys {
		cells = append(cells, k)
	}
	for _, v := range t.values {
		cells = append(cells, v)
	}
	return cells
}

// enter notes that a rank comes with a frame of an operation, and reports whether the operation goes on.
func (t *tensor) enter(h *wire.Header) bool {
	return (h.Flags&wire.FlagHome == 0 || t.r.arrive(t, h)) && !t.Gone(h.Iteration)
}

// cancel gives up every iteration from this one on.
func (t *tensor) cancel(from uint64, err error) {
	t.GiveUp(from)
	for _, c := range t.cells() {
		c.cancel(from, err)
	}
}

// Joined implements room.Shell.
func (t *tensor) Joined() rankset.Set { return t.r.joinedRanks() }

// Left implements room.Shell.
func (t *tensor) Left() rankset.Set { return t.r.leftRanks() }

// Fail implements room.Shell.
func (t *tensor) Fail(seq uint64, code units.FailureCode, text string) { t.r.fail(t, seq, code, text) }

// Refuse implements room.Shell.
func (t *tensor) Refuse(rank int, seq uint64, code units.FailureCode, text string) {
	t.r.tell([]agreement.Failure{{
		Ranks: rankset.Of(rank), Tensor: t.agreed, Count: seq, Code: code, Text: fmt.Sprintf("%q failed on rank %d: %s", t.Name, rank, text),
	}})
}

// Drop implements room.Shell.
func (t *tensor) Drop(iteration uint64) { t.r.drop(t, iteration) }

// Warn implements room.Shell.
func (t *tensor) Warn(rank int, missing rankset.Set, waited time.Duration) {
	t.r.warn(agreement.Stall{Rank: rank, Name: t.Name, Missing: missing, Waited: waited})
}

// Stop implements room.Shell.
func (t *tensor) Stop(rank int, h wire.Header) { t.r.stop(rank, h) }
