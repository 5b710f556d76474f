package server

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// tensor is an announced tensor: its keys as far as they lie on this server.
type tensor struct {
	wire.Tensor
	r         *round
	ranks     rankset.Set
	signature string
	dtype     units.DType // of what is summed: the sizes of allgather and alltoall are int64
	op        units.ReduceOp
	codec     codec.Codec // of pushes; nil for plain
	answers   codec.Codec // of what is sent back
	whole     bool        // contributions are kept apart until the last has come

	cancelled atomic.Uint64 // iterations from here on were given up

	model condition.Model

	mu      sync.Mutex
	keys    map[uint32]*key   // of what is summed
	values  map[uint32]*value // of what is held
	decider *decider          // of supersteps; nil where another tensor has it, or the model has none

	forgotten sync.Map // rank → count of the newest operation on a held value that it has given up
}

// holds reports whether the servers hold a value of the tensor, rather than sum its iterations.
func (t *tensor) holds() bool { return t.Kind == units.Accumulate }

// newTensor takes in what a rank says of a tensor, as far as it can be summed.
func newTensor(r *round, t *wire.Tensor) (*tensor, error) {
	n := &tensor{
		Tensor: *t, r: r, ranks: rankset.Of(t.Ranks...), signature: t.Signature(), dtype: t.DType, op: t.Op,
		keys: map[uint32]*key{}, values: map[uint32]*value{}, model: r.s.cfg.Model,
	}
	n.cancelled.Store(math.MaxUint64)
	if t.Sync != "" {
		var err error
		if n.model, err = condition.Parse(t.Sync); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	if t.Codec != "" {
		if err := n.setCodec(); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	if !t.Kind.Reduces() && t.Kind != units.Accumulate {
		n.dtype, n.op, n.Prescale, n.Postscale = units.Int64, units.Sum, 1, 1
	}
	// Where an iteration may be closed without a rank, a part of that rank's push must not be in the sum.
	n.whole = n.op == units.Adasum || r.s.cfg.RankOrder || !n.model.Whole()
	if err := n.check(); err != nil {
		return nil, err
	}
	return n, nil
}

// check finds what would be no tensor of this round, or not one that the kernels can take.
func (t *tensor) check() error {
	if !t.r.all.Covers(t.ranks) {
		return fmt.Errorf("tensor %q of ranks %v, where the job has %d", t.Name, t.ranks, t.r.all.Len())
	}
	unit := t.dtype.Size()
	if t.Kind.HasOp() {
		if err := t.model.CheckWorkers(len(t.Ranks)); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	if err := t.PullGate.Check(); err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	if t.PullGate != (wire.Gate{}) && (!t.holds() || t.codec == nil) {
		return fmt.Errorf("tensor %q: a gate for pulls is for held values that are coded", t.Name)
	}
	if t.holds() && t.op != units.Sum && t.op != units.Average {
		return fmt.Errorf("tensor %q: a held value takes Sum or Average, not %v", t.Name, t.op)
	}
	switch t.Kind {
	case units.Broadcast:
		return nil // nothing is summed
	case units.Barrier:
		unit = limits.MaxPayload + 1 // there is nothing to sum
	default:
		if err := reduce.Supported(t.op, t.dtype); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	for i, n := range t.Parts {
		if int(n)%unit != 0 {
			return fmt.Errorf("tensor %q: partition %d of %d bytes for a %v of %v", t.Name, i, n, t.Kind, t.dtype)
		}
	}
	return nil
}

// key finds or makes the key of one partition.
func (t *tensor) key(part uint32) (*key, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := t.keys[part]; k != nil {
		return k, nil
	}
	if t.Kind.HasRoot() || t.holds() {
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
	c := condition.Config{Live: t.liveRanks(), Model: t.model, Dataflow: flow}
	if t.SoftPark {
		c.Parking = condition.SoftBarrier
	}
	m, err := condition.New(c)
	if err != nil {
		return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	return m, nil
}

// liveRanks are those of the tensor's ranks that still take part. A sum needs what every rank has to give,
// so that one which left is an error; a held value goes on without it.
func (t *tensor) liveRanks() rankset.Set {
	live := t.ranks.Minus(t.r.joinedRanks())
	if t.holds() {
		live = live.Minus(*t.r.goneRanks.Load())
	}
	return live
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

// gone reports whether an iteration was given up. What is found to live under the lock of a key or of the
// exchange is also found by the cancel that comes after.
func (t *tensor) gone(iteration uint64) bool { return iteration >= t.cancelled.Load() }

// gaveUp is an iteration that no rank reaches: a tensor of which that is gone was given up from some one on.
const gaveUp = math.MaxUint64 - 1

// enter notes that a rank comes with a frame of an operation, and reports whether the operation goes on.
func (t *tensor) enter(h *wire.Header) bool {
	return (h.Flags&wire.FlagHome == 0 || t.r.arrive(t, h)) && !t.gone(h.Iteration)
}

// cancel gives up every iteration from this one on.
func (t *tensor) cancel(from uint64, err error) {
	t.mu.Lock()
	t.cancelled.Store(min(t.cancelled.Load(), from))
	t.mu.Unlock()
	for _, c := range t.cells() {
		c.cancel(from, err)
	}
}
