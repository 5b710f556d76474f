package held

import (
	"fmt"
	"math"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// contents are the bytes of a value.
//
// Invariants: acc is the root's value plus every difference that the machine admitted, each once and whole, in
// units of unit().
// A reader gets the bytes of one version: a copy that is made at most once for each.
type contents struct {
	*room.Part
	present bool         // acc has its memory
	acc     []byte       // in the accumulator's type
	copied  *room.Buffer // acc in the tensor's type; nil when it has changed since
	deltas  *deltas      // nil for plain
}

// answer is what a reader gets.
type answer struct {
	bytes  *room.Buffer // nil for a worker in this process that has it, and for nothing that is worth sending
	codec  uint8        // of bytes
	number uint32       // of the reference copy that the rank has with it; 0 for none
}

func newContents(p *room.Part, copies *Copies) contents {
	return contents{Part: p, deltas: newDeltas(p, copies)}
}

// makeRoom takes the memory of the value.
func (c *contents) makeRoom() error {
	if c.present {
		return nil
	}
	acc, err := c.Round.Pool.Get(reduce.AccBytes(c.Type, c.Bytes))
	if err != nil {
		return room.MemoryError{Err: err}
	}
	clear(acc)
	c.acc, c.present = acc, true
	return nil
}

// drop lets the memory of the value go.
func (c *contents) drop() {
	if c.present {
		c.Round.Pool.Put(c.acc)
		c.acc, c.present = nil, false
	}
	c.outdate()
	c.deltas.forget(func(int) bool { return true })
}

// share is what a difference counts for: the mean over all ranks that train, those that have left included,
// so that what one rank adds does not weigh more for the others' leaving.
func (c *contents) share() float64 {
	if c.Reduce == units.Average {
		return c.Prescale / float64(len(c.Ranks))
	}
	return c.Prescale
}

// unit is what one in the accumulator stands for. Where the share of a difference is a power of two it is that:
// then a message is added as it is, which for a sparse one takes the time of what it says, and the root's value
// is still exact.
func (c *contents) unit() float64 {
	if share := c.share(); c.deltas != nil && powerOfTwo(share) {
		return share
	}
	return 1
}

func powerOfTwo(f float64) bool {
	part, exponent := math.Frexp(f)
	return part == 0.5 && exponent > -64 && exponent < 64
}

// add adds what a push brings. A message that cannot be read adds nothing, and its operation fails; the push
// has been counted.
func (c *contents) add(r *reader, b []byte) error {
	switch {
	case r.has(wire.FlagEmpty):
	case c.deltas != nil:
		return c.addMessage(r.rank, b)
	default:
		c.sum(b, c.share())
	}
	return nil
}

func (c *contents) sum(b []byte, scale float64) {
	reduce.Add(units.Sum, c.Type, c.acc, b, scale)
	c.outdate()
}

// addMessage adds what a rank's message says, or nothing where that fails.
func (c *contents) addMessage(rank int, message []byte) error {
	scale := c.share() / c.unit()
	if scale == 1 && reduce.AccType(c.Type) == units.Float32 {
		if err := c.Pushes.DecodeAdd(c.acc, message); err != nil {
			return c.Malformed(rank, err)
		}
		c.outdate()
		return nil
	}
	wide, err := c.Round.Pool.Get(4 * c.Coding.Elements)
	if err != nil {
		return room.MemoryError{Err: err}
	}
	defer c.Round.Pool.Put(wide)
	if err := c.Pushes.Decode(wide, message); err != nil {
		return c.Malformed(rank, err)
	}
	reduce.AddFloat32(c.Type, c.acc, wide, scale)
	c.outdate()
	return nil
}

// outdate lets go what was made of the version before.
func (c *contents) outdate() {
	c.deltas.outdate()
	if c.copied != nil {
		c.copied.Sent(nil)
		c.copied = nil
	}
}

// read is the value for a reader. Iteration counts those that are closed, for codecs and gates.
func (c *contents) read(r *reader, iteration uint64) (answer, error) {
	if c.deltas != nil && (!r.to.Local() || c.deltas.alike) {
		return c.readCoded(r, iteration)
	}
	b, err := c.copy()
	return answer{bytes: b}, err
}

// copy is the value as it is, for one reader more.
func (c *contents) copy() (*room.Buffer, error) {
	if !c.present {
		return nil, fmt.Errorf("%q has no value", c.Name)
	}
	if c.copied == nil {
		b, err := c.Round.Pool.Get(c.Bytes)
		if err != nil {
			return nil, room.MemoryError{Err: err}
		}
		reduce.Store(c.Type, b, c.acc, c.Postscale*c.unit(), 1)
		c.copied = room.NewBuffer(c.Round.Pool, b)
	}
	return c.copied.Share(), nil
}

// wide is the value in float32, lent.
func (c *contents) wide() ([]byte, error) {
	wide, err := c.Round.Pool.Get(4 * c.Coding.Elements)
	if err != nil {
		return nil, room.MemoryError{Err: err}
	}
	reduce.StoreFloat32(c.Type, wide, c.acc, c.Postscale*c.unit())
	return wide, nil
}
