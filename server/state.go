package server

import (
	"fmt"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// state gives a rank the residual of a key's answers, for its checkpoint. A rank asks for what it has got the last
// answer of, so that nothing changes until it pushes again.
func (c *conn) state(h *wire.Header) error {
	k, err := c.r.codedKey(h)
	if err != nil {
		return err
	}
	f := outbox.Frame{Header: answerTo(h)}
	if res := k.lendResidual(); res != nil {
		f.Payload, f.Owner = res.buf, res
	}
	c.send(f)
	return nil
}

// State is the in-process way of the local worker: out stays as it is where there is no residual.
func (l *Local) State(h wire.Header, out []byte, done func(divisor uint32, err error)) {
	k, err := l.r.codedKey(&h)
	if err == nil {
		if res := k.lendResidual(); res != nil {
			op := localOp{out: out}
			err = op.take(res.buf)
			res.Sent(nil)
		}
	}
	done(0, err)
}

// restore takes in a piece of a key's residual, as a checkpoint has it. The rank waits for the answer before it
// pushes, so that the first sum that its push closes is encoded with the residual.
func (c *conn) restore(h *wire.Header, p *room.Payload) error {
	k, err := c.r.codedKey(h)
	if err == nil {
		err = k.hasRoom(h, p.Len())
	}
	if err != nil {
		return err
	}
	for at := int(4 * h.Aux); p.Len() > 0; {
		b, err := p.Next(min(p.Len(), room.ChunkBytes))
		if err != nil {
			return err
		}
		if err := k.setResidual(at, b); err != nil {
			k.t.OutOfMemory(h, room.MemoryError{Err: err})
			return p.Discard()
		}
		at += len(b)
	}
	c.send(outbox.Frame{Header: answerTo(h)})
	return nil
}

// Restore is the in-process way of the local worker.
func (l *Local) Restore(h wire.Header, in []byte, done func(divisor uint32, err error)) {
	k, err := l.r.codedKey(&h)
	if err == nil {
		err = k.hasRoom(&h, len(in))
	}
	if err == nil {
		if err = k.setResidual(int(4*h.Aux), in); err != nil {
			k.t.OutOfMemory(&h, room.MemoryError{Err: err})
			err = wire.ErrCancelled
		}
	}
	done(0, err)
}

func answerTo(h *wire.Header) wire.Header {
	return wire.Header{Type: wire.TypeResult, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Aux: h.Aux}
}

// codedKey finds the key of a coded sum.
func (r *round) codedKey(h *wire.Header) (*key, error) {
	t, err := r.tensor(h)
	if err != nil {
		return nil, err
	}
	k, err := t.key(h.Part)
	if err == nil && k.coding == nil {
		err = fmt.Errorf("%v of partition %d of %q, which is not coded", h.Type, h.Part, t.Name)
	}
	return k, err
}

// hasRoom checks that a piece lies within the key's residual, before memory is taken.
func (k *key) hasRoom(h *wire.Header, n int) error {
	size := uint64(k.coding.answers.ResidualBytes(k.coding.elements))
	if n%4 != 0 || h.Aux > size/4 || uint64(n) > size-4*h.Aux {
		return fmt.Errorf("%d bytes from element %d on for partition %d of %q, whose answers by %s keep a residual of %d bytes",
			n, h.Aux, k.part, k.t.Name, k.coding.answers, size)
	}
	return nil
}

// lendResidual is the residual for somebody who sends it; nil where there is none.
func (k *key) lendResidual() *result {
	k.mu.Lock()
	defer k.mu.Unlock()
	res := k.coding.residual
	if res != nil {
		res.refs.Add(1)
	}
	return res
}

// ownResidual is the residual to be changed; nil where the codec has none. One that is being sent stays as it is, and
// a copy takes its place. Callers hold mu.
func (k *key) ownResidual() ([]byte, error) {
	c := k.coding
	if c.residual != nil && c.residual.refs.Load() == 1 {
		return c.residual.buf, nil
	}
	n := c.answers.ResidualBytes(c.elements)
	if n == 0 {
		return nil, nil
	}
	b, err := k.t.r.s.pool.Get(n)
	if err != nil {
		return nil, err
	}
	if c.residual == nil {
		clear(b)
	} else {
		copy(b, c.residual.buf)
		c.residual.Sent(nil)
	}
	c.residual = newResult(k.t.r, b)
	return b, nil
}

// setResidual overwrites a piece of the residual, unless no iteration can follow. Where a sum closed before the piece
// came, as drop-stragglers lets it, the residual has what that answer lacked, and the piece is added.
func (k *key) setResidual(at int, piece []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.t.Gone(room.GaveUp) {
		return nil
	}
	residual, err := k.ownResidual()
	switch {
	case err != nil:
	case k.machine.V() > 0 && len(residual) > 0:
		reduce.Add(units.Sum, units.Float32, residual[at:at+len(piece)], piece, 1)
	default:
		copy(residual[at:], piece)
	}
	return err
}
