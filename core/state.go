package core

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/paceline/paceline/internal/limits"
)

// State is what a worker keeps of coded tensors from one operation to the next: what their messages lacked so far.
// A checkpoint has it beside the model, or what the residuals hold is lost when training goes on from there.
// (Servers keep residuals of answers, which start at zero then; so do the bases of held values, which are no more
// than what a rank was sent. When all ranks have joined, everybody begins anew, without residuals.)
//
// Its bytes are stateMagic, then for each tensor, all numbers little-endian:
//
//	uint32 process set, uint32 length and name, uint32 length and signature, uint64 length and the residual,
//	which is whole tensors of float32 in the machine's byte order, whatever partitions the tensor is cut into
const stateMagic = "PLS1"

// stateID tells whose residual it is.
type stateID struct {
	nameID
	signature string
}

var errState = errors.New("this is no state of a worker's residuals")

// State writes the state to dst and returns its length. Where dst is shorter, nothing is written. No operation on
// a coded tensor may be in flight.
func (e *Engine) State(dst []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	size := len(stateMagic)
	var with []stateID
	found := map[stateID]*declaration{}
	for id, n := range e.names {
		for _, d := range n.decls {
			if d.coding == nil || d.coding.stateBytes() == 0 {
				continue
			}
			if len(n.inflight) > 0 { // looked at first: the encoder may be at its residual
				return 0, fmt.Errorf("%w: %q is in flight on rank %d; synchronise it before its state is taken", ErrInvalid, id.name, e.cfg.Rank)
			}
			if !d.coding.used() {
				continue
			}
			s := stateID{id, d.t.Signature()}
			with = append(with, s)
			found[s] = d
			size += 20 + len(id.name) + len(s.signature) + d.coding.stateBytes()
		}
	}
	for s, r := range e.residuals { // what has been set and is still to be used
		if found[s] == nil {
			with = append(with, s)
			size += 20 + len(s.name) + len(s.signature) + len(r)
		}
	}
	if len(dst) < size {
		return size, nil
	}
	slices.SortFunc(with, func(a, b stateID) int {
		return cmp.Or(cmp.Compare(a.set, b.set), cmp.Compare(a.name, b.name), cmp.Compare(a.signature, b.signature))
	})
	b := dst[:copy(dst, stateMagic)]
	le := binary.LittleEndian
	for _, s := range with {
		b = le.AppendUint32(b, s.set)
		b = append(le.AppendUint32(b, uint32(len(s.name))), s.name...)
		b = append(le.AppendUint32(b, uint32(len(s.signature))), s.signature...)
		if found[s] == nil {
			b = append(le.AppendUint64(b, uint64(len(e.residuals[s]))), e.residuals[s]...)
			continue
		}
		k := found[s].coding
		b = le.AppendUint64(b, uint64(k.stateBytes()))
		at := len(b)
		b = b[:at+k.stateBytes()]
		k.save(b[at:])
	}
	return len(b), nil
}

// SetState takes in what State wrote; what it does not name starts at zero. Tensors that are not declared yet find
// their residuals when they are. Nothing changes where there is an error.
func (e *Engine) SetState(state []byte) error {
	residuals, err := parseState(state)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, n := range e.names {
		for _, d := range n.decls {
			if d.coding == nil {
				continue
			}
			if len(n.inflight) > 0 {
				return fmt.Errorf("%w: %q is in flight on rank %d; synchronise it before its state is set", ErrInvalid, id.name, e.cfg.Rank)
			}
			if r, ok := residuals[stateID{id, d.t.Signature()}]; ok && len(r) != d.coding.stateBytes() {
				return fmt.Errorf("%w: the state has a residual of %d bytes of %q, want %d", ErrInvalid, len(r), id.name, d.coding.stateBytes())
			}
		}
	}
	for id, n := range e.names {
		for _, d := range n.decls {
			if d.coding != nil {
				s := stateID{id, d.t.Signature()}
				d.coding.load(residuals[s])
				delete(residuals, s)
			}
		}
	}
	e.residuals = map[stateID][]byte{}
	for s, r := range residuals { // the caller's memory stays the caller's
		e.residuals[s] = slices.Clone(r)
	}
	return nil
}

func parseState(b []byte) (map[stateID][]byte, error) {
	if len(b) < len(stateMagic) || string(b[:len(stateMagic)]) != stateMagic {
		return nil, errState
	}
	b = b[len(stateMagic):]
	residuals := map[stateID][]byte{}
	le := binary.LittleEndian
	cut := func(n, most uint64) ([]byte, bool) {
		if n > most || n > uint64(len(b)) {
			return nil, false
		}
		piece := b[:n]
		b = b[n:]
		return piece, true
	}
	for len(b) > 0 {
		var s stateID
		number, ok := cut(4, 4)
		if !ok {
			return nil, errState
		}
		s.set = le.Uint32(number)
		for _, text := range []*string{&s.name, &s.signature} {
			if number, ok = cut(4, 4); !ok {
				return nil, errState
			}
			piece, ok := cut(uint64(le.Uint32(number)), limits.MaxControl)
			if !ok {
				return nil, errState
			}
			*text = string(piece)
		}
		if number, ok = cut(8, 8); !ok {
			return nil, errState
		}
		residual, ok := cut(le.Uint64(number), 4*limits.MaxTensor)
		if !ok {
			return nil, errState
		}
		residuals[s] = residual
	}
	return residuals, nil
}

// restore gives a declaration the residual that SetState had for it. Callers hold mu.
func (e *Engine) restore(id nameID, d *declaration) {
	s := stateID{id, d.t.Signature()}
	r, ok := e.residuals[s]
	if !ok {
		return
	}
	delete(e.residuals, s)
	if len(r) != d.coding.stateBytes() {
		e.cfg.Log.Warn(fmt.Sprintf("the residual of %q that was set has %d bytes, not %d: it starts at zero", id.name, len(r), d.coding.stateBytes()))
		return
	}
	d.coding.load(r)
}

// used reports whether any partition has a residual.
func (k *coding) used() bool {
	return slices.ContainsFunc(k.parts, func(p codedPart) bool { return len(p.residual) > 0 })
}

// stateBytes is the size of the residuals of all partitions.
func (k *coding) stateBytes() int {
	n := 0
	for i := range k.parts {
		n += k.codec.ResidualBytes(k.parts[i].elements)
	}
	return n
}

// save writes the residuals to b: of a codec that keeps several tensors, one behind the other.
func (k *coding) save(b []byte) {
	clear(b)
	k.each(b, func(whole, part []byte) { copy(whole, part) })
}

// load is the way back; nothing for zeros.
func (k *coding) load(b []byte) {
	for i := range k.parts {
		k.parts[i].residual = nil
		if b != nil {
			k.parts[i].residual = make([]byte, k.codec.ResidualBytes(k.parts[i].elements))
		}
	}
	if b != nil {
		k.each(b, func(whole, part []byte) { copy(part, whole) })
	}
}

// each calls f with the pieces of b and of partitions' residuals that belong together.
func (k *coding) each(b []byte, f func(whole, part []byte)) {
	tensors := k.codec.ResidualBytes(1) / 4
	for t := range tensors {
		for i := range k.parts {
			p := &k.parts[i]
			if size := 4 * p.elements; len(p.residual) > 0 {
				f(b[:size], p.residual[t*size:(t+1)*size])
			}
			b = b[4*p.elements:]
		}
	}
}
