package worker

import (
	"errors"
	"fmt"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// coding is how the partitions of a declaration travel.
type coding struct {
	codec   codec.Codec
	answers codec.Codec // of what servers send back
	held    bool        // servers hold a value, and no residuals
	follow  bool        // what they send back are differences to the rank's reference copy
	dtype   units.DType
	parts   []codedPart
}

// codedPart is what this rank keeps of a partition from one operation to the next. It belongs to the one
// operation of the name that is in flight.
type codedPart struct {
	key       uint64 // of the streams that it draws from
	elements  int
	residual  []byte // what its messages lacked so far; nil before the first
	reference []byte // of a held value: the rank's reference copy, float32; nil for none
	number    uint32 // of the reference copy
}

func newCoding(c codec.Codec, t *wire.Tensor) *coding {
	k := &coding{codec: c, answers: c.Answer(), held: t.Kind == units.Accumulate, dtype: t.DType, parts: make([]codedPart, len(t.Parts))}
	if k.held {
		k.answers, k.follow = c.Difference(), !c.Precise() || t.PullGate != (options.Gate{})
	}
	for i, n := range t.Parts {
		k.parts[i] = codedPart{key: codec.KeyOf(t.ProcessSet, t.Name, uint32(i)), elements: int(n) / t.DType.Size()}
	}
	return k
}

// arrives checks what an answer says of its length, before memory is allocated for it.
func (t *task) arrives(h *wire.Header, from fmt.Stringer) error {
	if t.h.Type == wire.TypeState || t.h.Type == wire.TypeRestore {
		if h.Codec != wire.CodecPlain || h.Length > 0 && int(h.Length) != len(t.out) {
			return fmt.Errorf("%v answers with %d bytes of residual of partition %d of %q in encoding %d, want %d", from, h.Length, h.Part, t.o.name(), h.Codec, len(t.out))
		}
		return nil
	}
	if t.o.Authenticated && h.Flags&wire.FlagAuthenticated == 0 && h.Length > 0 {
		return fmt.Errorf("%v answers partition %d of %q, which is declared as authenticated, without authentication tags", from, h.Part, t.o.name())
	}
	if h.Flags&wire.FlagEmpty != 0 {
		return t.arrivesEmpty(h, from)
	}
	if h.Codec == wire.CodecDeclared && t.o.d.coding != nil {
		k := t.o.d.coding
		if most := k.answers.MaxEncoded(k.parts[t.h.Part].elements); int(h.Length) > most {
			return fmt.Errorf("%v answers partition %d of %q with a message of %d bytes, at most %d are possible", from, h.Part, t.o.name(), h.Length, most)
		}
		return nil
	}
	if h.Codec != wire.CodecPlain || t.o.d.coding != nil && t.o.Kind != units.Accumulate {
		return fmt.Errorf("%v answers partition %d of %q in encoding %d, where that is declared as %q", from, h.Part, t.o.name(), h.Codec, t.o.d.t.Codec)
	}
	if t.rows != nil { // a lost rank may have given more than this one knows of; limits.MaxPayload bounds it
		return nil
	}
	if (t.placed || t.staged) && h.Flags&wire.FlagInPlace != 0 && h.Length == 0 {
		return nil
	}
	if int(h.Length) != len(t.out) {
		return fmt.Errorf("%v answers partition %d of %q with %d bytes, want %d", from, h.Part, t.o.name(), h.Length, len(t.out))
	}
	return nil
}

// arrivesEmpty is arrives for an answer without a payload: a sum to which nobody had anything to add, or a held value
// that has not changed by much.
func (t *task) arrivesEmpty(h *wire.Header, from fmt.Stringer) error {
	k := t.o.d.coding
	switch {
	case h.Length > 0:
		return fmt.Errorf("%v answers partition %d of %q with %d bytes and says that there are none", from, h.Part, t.o.name(), h.Length)
	case k == nil && h.Codec == wire.CodecPlain && t.o.Kind.HasOp() && t.o.Kind != units.Accumulate:
		return nil
	case k != nil && k.follow && k.parts[h.Part].reference != nil && k.parts[h.Part].number == h.Reference && h.Codec == wire.CodecDeclared:
		return nil
	}
	return fmt.Errorf("%v gives no answer for partition %d of %q, and this rank has none", from, h.Part, t.o.name())
}

// decode turns the message of an answer into the output.
func (t *task) decode(h *wire.Header, message []byte, from fmt.Stringer) (err error) {
	if k := t.o.d.coding; k.follow {
		err = k.move(&k.parts[h.Part], h, t.out, message)
	} else {
		err = k.decode(t.o.e.encoder.pool, t.out, message)
	}
	if err != nil {
		return fmt.Errorf("partition %d of %q on rank %d: the answer of %v: %w", t.h.Part, t.o.name(), t.o.e.cfg.Rank, from, err)
	}
	return nil
}

// move adds a difference to the reference copy, which then is the value.
func (k *coding) move(p *codedPart, h *wire.Header, out, message []byte) error {
	if p.reference == nil {
		return errors.New("a difference to a value that this rank does not have")
	}
	if h.Flags&wire.FlagEmpty == 0 {
		if err := k.answers.DecodeAdd(p.reference, message); err != nil {
			return err
		}
	}
	p.number = h.Reference
	reduce.Narrow(k.dtype, out, p.reference)
	return nil
}

// start makes a reference copy of a value that came as it is, if the server does.
func (k *coding) start(h *wire.Header, value []byte) {
	p := &k.parts[h.Part]
	if p.number = h.Reference; p.number == 0 {
		p.reference = nil
		return
	}
	if p.reference == nil {
		p.reference = make([]byte, 4*p.elements)
	}
	reduce.Widen(k.dtype, p.reference, value)
}

func (k *coding) decode(pool *mempool.Pool, out, message []byte) error {
	if k.dtype == units.Float32 {
		return k.answers.Decode(out, message)
	}
	wide, err := pool.Get(4 * (len(out) / k.dtype.Size()))
	if err != nil {
		return fmt.Errorf("%w: float32 elements: %w", ErrMemory, err)
	}
	defer pool.Put(wide)
	if err := k.answers.Decode(wide, message); err != nil {
		return err
	}
	reduce.Narrow(k.dtype, out, wide)
	return nil
}

// checkCodec reads what an operation names as its codec, once for each text.
func (b *book) checkCodec(op *Op) error {
	if op.Codec == "" || b.policies[op.Codec] != nil {
		return nil
	}
	p, err := b.cfg.LoadPolicy(op.Codec)
	if err != nil {
		return fmt.Errorf("%w: %q: %w", ErrInvalid, op.name(), err)
	}
	b.policies[op.Codec] = p
	return nil
}

// codecOf is how an operation's tensor travels, nil for plain: sums and differences of floating-point numbers
// are coded as the policy says, everything else is plain. A residual belongs to a name, so that a tensor
// without one of its program's is plain too where the codec would keep one.
func (b *book) codecOf(op *Op) codec.Codec {
	if !op.Kind.HasOp() || op.ReduceOp != units.Sum && op.ReduceOp != units.Average {
		return nil
	}
	p := b.cfg.Policy
	if op.Codec != "" {
		p = b.policies[op.Codec]
	}
	bytes, err := op.bytes()
	if err != nil {
		return nil // check has refused it
	}
	c := p.Choose(policy.Tensor{Name: op.name(), DType: op.DType, Bytes: bytes})
	if c == nil && op.PullGate != (options.Gate{}) {
		c = codec.None()
	}
	if c == nil || !op.named() && c.Answer().ResidualBytes(1)+c.ResidualBytes(1) > 0 {
		return nil
	}
	return c
}

// codecText is codecOf as it is declared.
func (b *book) codecText(op *Op) string {
	if c := b.codecOf(op); c != nil {
		return c.String()
	}
	return ""
}
