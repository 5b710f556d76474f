package room

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Tensor is an announced tensor: what rooms ask about it.
type Tensor struct {
	wire.Tensor
	Round *Round
	Shell Shell

	Members rankset.Set    // its ranks
	Type    units.DType    // of what is summed: the sizes of allgather and alltoall are int64
	Reduce  units.ReduceOp // by which it is summed
	Pushes  codec.Codec    // of pushes; nil for plain
	Answers codec.Codec    // of the sums that are sent back
	Whole   bool           // contributions are kept apart until the last has come
	Model   condition.Model
	Hosts   membership.HostSums // that push one sum each; of a server that sums for its host: none
	Climbs  Climbs              // the uplink's; nil where sums stay here

	cancelled atomic.Uint64 // iterations from here on were given up
}

// AnswerFlags are the flags of every answer with bytes of the tensor.
func (t *Tensor) AnswerFlags() wire.Flags {
	if t.Authenticated {
		return wire.FlagAuthenticated
	}
	return 0
}

// NewTensor reads what a rank says of a tensor, as far as the rooms can serve it.
func NewTensor(t *wire.Tensor, r *Round, s Shell) (*Tensor, error) {
	n := &Tensor{Tensor: *t, Round: r, Shell: s, Members: rankset.Of(t.Ranks...), Type: t.DType, Reduce: t.Op, Model: r.Model}
	n.cancelled.Store(math.MaxUint64)
	if t.Sync.Model != "" {
		var err error
		if n.Model, err = condition.Parse(t.Sync.Model); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	if t.Codec != "" {
		if err := n.setCodec(); err != nil {
			return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	if !t.Kind.HasOp() { // what a rank says of that is none
		n.Reduce, n.Prescale, n.Postscale = units.Sum, 1, 1
		if !t.Kind.Reduces() {
			n.Type = units.Int64
		}
	}
	// Where an iteration may be closed without a rank, a part of that rank's push must not be in the sum.
	n.Whole = n.Reduce == units.Adasum || r.RankOrder || r.Elastic || !n.Model.Whole()
	if err := n.check(); err != nil {
		return nil, fmt.Errorf("tensor %q: %w", t.Name, err)
	}
	n.setHosts()
	return n, nil
}

// Held reports whether the servers hold a value of the tensor, rather than sum its iterations.
func (t *Tensor) Held() bool { return t.Kind == units.Accumulate }

// Carried reports whether the tensor is a held value that goes on where its server leaves the job.
func (t *Tensor) Carried() bool {
	return t.Held() && t.Round.Elastic
}

// Dataflow is the papers' name for that.
func (t *Tensor) Dataflow() condition.Dataflow {
	if t.Held() {
		return condition.Accumulate
	}
	return condition.Aggregate
}

// Elsewhere reports whether a partition has been moved to another server, which lives.
func (t *Tensor) Elsewhere(part uint32) bool {
	return t.Round.Elastic && t.Round.Membership.Now().Elsewhere(membership.Key{Name: membership.Name{Set: t.ProcessSet, Name: t.Name}, Number: t.ID, Part: int(part)}, t.Round.Here)
}

// Whereabouts is where a partition of an elastic job was found last. Its owner's lock guards it.
type Whereabouts struct {
	epoch *membership.Epoch
	away  bool
}

// Look looks where the partition is, if there is a new epoch. left: it was here until then.
func (w *Whereabouts) Look(p *Part) (away, left bool) {
	if now := p.Round.Membership.Now(); now != w.epoch {
		was := w.away
		w.epoch, w.away = now, p.Elsewhere(p.Number)
		left = w.away && !was
	}
	return w.away, left
}

// Live are those of the tensor's ranks that still take part. A sum needs what every rank has to give,
// so that one which left is an error; a held value goes on without it, and so does in an elastic job all that does not split rows.
func (t *Tensor) Live() rankset.Set {
	live := t.Members.Minus(t.Zeros())
	if t.Held() || t.Round.Elastic && !t.Kind.Splits() {
		live = live.Minus(t.Shell.Left())
	}
	return live
}

// Keeper is the rank whose checkpoint has the residual of a partition, as the ranks find it.
func (t *Tensor) Keeper(part uint32) int {
	var offset int64
	for _, n := range t.Parts[:part] {
		offset += int64(n)
	}
	return t.Ranks[placement.Keeper(t.Kind, codec.KeyOf(t.ProcessSet, t.Name, 0), t.Shape, t.DType.Size(), len(t.Ranks), int(part), offset)]
}

// Zeros are those of the tensor's ranks that have joined: they count as having brought zeros (Horovod's rule). There
// are none where an operation needs every rank: it then waits until its home server fails it.
func (t *Tensor) Zeros() rankset.Set {
	if t.Kind.NeedsAll() {
		return rankset.Set{}
	}
	return t.Shell.Joined().Overlap(t.Members)
}

// Lost are the ranks that an operation of an elastic job does without.
func (t *Tensor) Lost() rankset.Set {
	if !t.Round.Elastic {
		return rankset.Set{}
	}
	return t.Shell.Left().Overlap(t.Members)
}

// Gone reports whether an iteration was given up. What is found to live under the lock of a room is also found by the
// room's Cancel, which comes after.
func (t *Tensor) Gone(iteration uint64) bool { return iteration >= t.cancelled.Load() }

// GivenUp reports whether the tensor was given up from some iteration on: its ranks declare it anew.
func (t *Tensor) GivenUp() bool { return t.cancelled.Load() != math.MaxUint64 }

// GiveUp has every iteration from this one on be gone. The rooms' Cancel follows.
func (t *Tensor) GiveUp(from uint64) {
	for have := t.cancelled.Load(); from < have && !t.cancelled.CompareAndSwap(have, from); have = t.cancelled.Load() {
	}
}

// OutOfMemory ends an operation on every rank, and lets go at once of what is held for it.
func (t *Tensor) OutOfMemory(h *wire.Header, err error) {
	t.Shell.Fail(h.Seq, units.FailMemory, err.Error())
	t.Shell.Drop(h.Iteration)
}

// setCodec sets how the tensor is coded.
func (t *Tensor) setCodec() error {
	c, err := codec.Parse(t.Codec)
	if err != nil {
		return err
	}
	if !t.Kind.HasOp() || !t.DType.Float() || t.Op != units.Sum && t.Op != units.Average {
		return fmt.Errorf("codec %s for a %v by %v of %v: only sums of floating-point tensors are coded", c, t.Kind, t.Op, t.DType)
	}
	for i, n := range t.Parts {
		if most := c.MaxEncoded(int(n) / t.DType.Size()); most > limits.MaxPayload {
			return fmt.Errorf("codec %s: a message of partition %d may have %d bytes, limit %d: make partitions smaller", c, i, most, limits.MaxPayload)
		}
	}
	t.Pushes, t.Answers = c, c.Answer()
	return nil
}

// check finds what would be no tensor of this round, or not one that the kernels can take.
func (t *Tensor) check() error {
	if ranks := len(t.Round.Membership.Now().Workers); !rankset.Range(ranks).Covers(t.Members) {
		return fmt.Errorf("it is of ranks %v, where the job has %d", t.Members, ranks)
	}
	if t.Kind.HasOp() {
		if err := t.Model.CheckWorkers(len(t.Ranks)); err != nil {
			return err
		}
	}
	if err := t.checkHeld(); err != nil {
		return err
	}
	if err := t.checkServers(); err != nil {
		return err
	}
	unit := t.Type.Size()
	switch t.Kind {
	case units.Broadcast:
		return nil // nothing is summed
	case units.Barrier:
		unit = limits.MaxPayload + 1 // there is nothing to sum
	default:
		if err := reduce.Supported(t.Reduce, t.Type); err != nil {
			return err
		}
	}
	for i, n := range t.Parts {
		if int(n)%unit != 0 {
			return fmt.Errorf("partition %d of %d bytes for a %v of %v", i, n, t.Kind, t.Type)
		}
	}
	return nil
}

func (t *Tensor) checkHeld() error {
	if t.PullGate != (options.Gate{}) && (!t.Held() || t.Pushes == nil) {
		return errors.New("a gate for pulls is for held values that are coded")
	}
	if t.Held() && t.Reduce != units.Sum && t.Reduce != units.Average {
		return fmt.Errorf("a held value takes Sum or Average, not %v", t.Reduce)
	}
	if t.Carried() && t.Postscale == 0 {
		return errors.New("a held value of an elastic job has a postscale of 0, so that it cannot go on from what ranks read")
	}
	return nil
}
