package held

import (
	"math"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// deltas is how a held value is read where its tensor is coded. A codec that is precise makes one message of
// each version, for all readers. Of the others a message says too little of a value, and a reader gets the
// difference to what it has:
//
//   - The server keeps the reference copy that each reading rank has, and encodes value - copy: once for all ranks with
//     the same one, as ranks have that the synchronisation model keeps together.
//   - Both add what the message says to the copy, by the same operations, so that the copies stay the same bits.
//   - Each copy has a number, which the rank gives back with its next read. Where the server's own says otherwise,
//     because an answer was lost or given up, or the copy was evicted where memory was short, it sends the value
//     itself, and both start anew with that.
//   - Where the tensor has a gate for pulls, a difference that it holds back is not sent: the rank stays at its copy.
//
// The worker in this process gets what it would get elsewhere where a model keeps ranks together, which then hold the
// same bits, and where a gate is to hold for it too; else the value itself, which is nearer and costs no encoding.
//
// Invariant: a rank's reference copy is the same bits at both ends, or the numbers of the two differ.
type deltas struct {
	copies   *Copies
	by       codec.Codec // of differences, or of values
	precise  bool
	alike    bool         // the worker in this process gets what the others get
	version  uint64       // how often the value has changed
	message  *room.Buffer // precise: the value as it is; nil when it has changed since
	ranks    map[int]*reference
	whole    *reference              // of those who get the value itself, as it is; nil when it has changed since
	current  map[*reference]struct{} // those with a delta
	withheld uint64                  // answers that the gate held back
	numbers  uint32                  // of reference copies so far
}

// newDeltas makes it for a value; nil for a plain one.
func newDeltas(p *room.Part, copies *Copies) *deltas {
	if p.Coding == nil {
		return nil
	}
	by := p.Pushes.Difference()
	gated := p.PullGate != (options.Gate{})
	return &deltas{
		copies: copies, by: by, precise: !gated && by.Precise(), alike: gated || !p.Model.Ahead(),
		ranks: map[int]*reference{}, current: map[*reference]struct{}{},
	}
}

// readCoded is the value for a rank that reads it.
func (c *contents) readCoded(r *reader, iteration uint64) (answer, error) {
	d := c.deltas
	if c.present && !r.has(wire.FlagPlain|wire.FlagDeclare) {
		if d.precise {
			if message, err := c.message(iteration); err == nil {
				return answer{bytes: message, codec: wire.CodecDeclared}, nil
			}
		}
		if have := d.ranks[r.rank]; have != nil && (have.number == r.h.Reference || r.to.Local()) {
			if a, err := c.follow(r, have, iteration); err == nil {
				return a, nil
			}
		}
	}
	b, err := c.copy()
	if err != nil || d.precise {
		return answer{bytes: b}, err
	}
	return answer{bytes: b, number: c.startAnew(r.rank, b.Bytes)}, nil
}

// message is the value encoded, once for each version, for one reader more.
func (c *contents) message(iteration uint64) (*room.Buffer, error) {
	if c.deltas.message == nil {
		wide, err := c.wide()
		if err != nil {
			return nil, err
		}
		defer c.Round.Pool.Put(wide)
		message, err := c.encode(wide, iteration)
		if err != nil {
			return nil, err
		}
		c.deltas.message = room.NewBuffer(c.Round.Pool, message)
	}
	return c.deltas.message.Share(), nil
}

// follow brings a rank with a reference copy to the value as it is.
func (c *contents) follow(r *reader, have *reference, iteration uint64) (answer, error) {
	d := c.deltas
	to := have.delta
	if to != nil && to.message == nil && to.iteration != iteration { // the gate's threshold may have fallen
		d.drop(have)
		to = nil
	}
	if to == nil {
		var err error
		if to, err = c.delta(have, iteration); err != nil {
			return answer{}, err
		}
	}
	next := to.next
	if to.message == nil {
		next = have
		d.withheld++
	}
	a := answer{codec: wire.CodecDeclared, number: next.number}
	if r.to.Local() {
		err := d.copies.use(next, func(elements []byte) error {
			reduce.Narrow(c.Type, r.to.Out, elements)
			return nil
		})
		if err != nil {
			return answer{}, err
		}
	} else if to.message != nil {
		a.bytes = to.message.Share()
	}
	if next != have {
		next.users++
		d.ranks[r.rank] = next
		d.leave(have)
	}
	return a, nil
}

// delta makes what the ranks with a reference copy get of the value as it is, once for all of them.
func (c *contents) delta(from *reference, iteration uint64) (to *delta, err error) {
	d := c.deltas
	wide, err := c.wide()
	if err != nil {
		return nil, err
	}
	defer c.Round.Pool.Put(wide)
	err = d.copies.use(from, func(elements []byte) error {
		to = &delta{iteration: iteration}
		if c.differ(wide, elements, iteration) {
			return nil
		}
		message, err := c.encode(wide, iteration)
		if err != nil {
			return err
		}
		to.next, err = d.add(c.Coding.Elements, func(b []byte) error {
			copy(b, elements)
			if err := d.by.DecodeAdd(b, message); err != nil {
				return err
			}
			return finite(b)
		})
		if err != nil {
			c.Round.Pool.Put(message)
			return err
		}
		to.message = room.NewBuffer(c.Round.Pool, message)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for other := range d.current { // else a rank that reads on would leave a copy behind for each time
		if other.delta.next == from {
			d.drop(other)
		}
	}
	from.delta = to
	d.current[from] = struct{}{}
	return to, nil
}

// differ takes a reference copy from the value, and reports whether the gate holds the difference back.
func (c *contents) differ(wide, reference []byte, iteration uint64) bool {
	threshold := c.PullGate.At(max(iteration, 1))
	if threshold == 0 {
		reduce.Add(units.Sum, units.Float32, wide, reference, -1)
		return false
	}
	size := reduce.Norm(wide)
	reduce.Add(units.Sum, units.Float32, wide, reference, -1)
	change := reduce.Norm(wide)
	return change == 0 || change < threshold*size // what is not finite is sent
}

// encode makes a message of the value, or of a difference to it.
func (c *contents) encode(wide []byte, iteration uint64) ([]byte, error) {
	residual, err := c.Round.Pool.Get(c.deltas.by.ResidualBytes(c.Coding.Elements))
	if err != nil {
		return nil, room.MemoryError{Err: err}
	}
	defer c.Round.Pool.Put(residual)
	clear(residual)
	return c.Coding.Encode(c.deltas.by, wide, residual, c.Coding.At(iteration, c.deltas.version))
}

// finite refuses what no difference leads away from.
func finite(elements []byte) error {
	if size := reduce.Norm(elements); math.IsNaN(size) || math.IsInf(size, 0) {
		return errNotFinite
	}
	return nil
}

// startAnew notes that a rank gets the value itself, and gives the number of the reference copy that it is; 0 where there
// is no memory for one, or no difference to it: infinity less infinity is NaN for ever, though the value may be finite
// again, or in float64 have never been anything else.
func (c *contents) startAnew(rank int, plain []byte) uint32 {
	d := c.deltas
	if d.whole != nil && d.copies.evicted(d.whole) {
		d.leave(d.whole)
		d.whole = nil
	}
	if d.whole == nil {
		whole, err := d.add(c.Coding.Elements, func(b []byte) error {
			reduce.Widen(c.Type, b, plain)
			return finite(b)
		})
		if err != nil {
			d.forgetRank(rank)
			return 0
		}
		d.whole = whole
	}
	d.whole.users++
	d.forgetRank(rank)
	d.ranks[rank] = d.whole
	return d.whole.number
}
