package worker

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// A state's bytes are stateMagic, then for each tensor, all numbers little-endian:
//
//	uint32 process set, uint32 length and name, uint32 length and signature, uint64 iterations,
//	uint64 length and the rank's residual, uint32 pieces, each uint64 first element, uint64 length and the piece
//
// Residuals are float32 in the machine's byte order. The rank's own is as many whole tensors as its codec keeps, or
// nothing for zeros.
const stateMagic = "PLS2"

// saved is what a state has of one tensor.
type saved struct {
	iterations uint64
	residual   []byte
	answers    []piece
}

// piece is a part of a tensor that servers keep: float32 elements.
type piece struct {
	first    int // element
	elements []byte
}

var errState = errors.New("this is no state of coded tensors")

// stateEntry is one tensor of a state that is being written.
type stateEntry struct {
	stateID
	d    *declaration // nil for one that is not used yet, of which the state is what was set
	kept *saved
	own  int   // bytes of the rank's own residual
	mine []int // partitions of which the servers' residuals are in it
}

func (s *stateEntry) bytes() int {
	n := 4 + 4 + len(s.name) + 4 + len(s.signature) + 8 + 8 + s.own + 4
	if s.d == nil {
		for _, p := range s.kept.answers {
			n += 16 + len(p.elements)
		}
	}
	for _, i := range s.mine {
		n += 16 + s.d.coding.answerBytes(i)
	}
	return n
}

// append writes an entry, but for the servers' part: that is for the tasks to read.
func (s *stateEntry) append(b []byte, o *operation) (_ []byte, tasks []*task) {
	le := binary.LittleEndian
	b = le.AppendUint32(b, s.set)
	b = append(le.AppendUint32(b, uint32(len(s.name))), s.name...)
	b = append(le.AppendUint32(b, uint32(len(s.signature))), s.signature...)
	if s.d == nil {
		b = le.AppendUint64(b, s.kept.iterations)
		b = append(le.AppendUint64(b, uint64(s.own)), s.kept.residual...)
		b = le.AppendUint32(b, uint32(len(s.kept.answers)))
		for _, p := range s.kept.answers {
			b = le.AppendUint64(b, uint64(p.first))
			b = append(le.AppendUint64(b, uint64(len(p.elements))), p.elements...)
		}
		return b, nil
	}
	k := s.d.coding
	b = le.AppendUint64(b, s.d.before+s.d.next)
	b = le.AppendUint64(b, uint64(s.own))
	b = b[:len(b)+s.own]
	if s.own > 0 {
		k.save(b[len(b)-s.own:])
	}
	b = le.AppendUint32(b, uint32(len(s.mine)))
	for _, i := range s.mine {
		b = le.AppendUint64(b, uint64(s.d.offsets[i])/uint64(k.dtype.Size()))
		n := k.answerBytes(i)
		b = le.AppendUint64(b, uint64(n))
		b = b[:len(b)+n]
		out := b[len(b)-n:]
		clear(out)
		tasks = append(tasks, &task{o: o, h: o.header(wire.TypeState, i, units.Float32), server: s.d.server(i), out: out, answer: true})
	}
	return b, tasks
}

// clone is a copy in the engine's memory: the caller's stays the caller's.
func (k *saved) clone() *saved {
	c := &saved{iterations: k.iterations, residual: slices.Clone(k.residual)}
	for _, p := range k.answers {
		c.answers = append(c.answers, piece{p.first, slices.Clone(p.elements)})
	}
	return c
}

// parseState reads a state. What it gives lies in b.
func parseState(b []byte) (map[stateID]*saved, error) {
	if len(b) < len(stateMagic) || string(b[:len(stateMagic)]) != stateMagic {
		return nil, errState
	}
	r := stateReader{b: b[len(stateMagic):]}
	all := map[stateID]*saved{}
	for len(r.b) > 0 && !r.bad {
		var s stateID
		s.set = uint32(r.number(4))
		s.name = string(r.cut(r.number(4), limits.MaxName))
		s.signature = string(r.cut(r.number(4), limits.MaxControl))
		k := &saved{iterations: r.number(8)}
		k.residual = r.cut(r.number(8), 4*limits.MaxTensor)
		for range r.number(4) {
			first := r.number(8)
			elements := r.cut(r.number(8), 4*limits.MaxTensor)
			if r.bad = r.bad || first > limits.MaxTensor || len(elements)%4 > 0; r.bad {
				break
			}
			k.answers = append(k.answers, piece{int(first), elements})
		}
		all[s] = k
	}
	if r.bad {
		return nil, errState
	}
	return all, nil
}

// stateReader cuts a state into its fields. After one that is not there or too long all are empty.
type stateReader struct {
	b   []byte
	bad bool
}

func (r *stateReader) cut(n, most uint64) []byte {
	if r.bad || n > most || n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	piece := r.b[:n]
	r.b = r.b[n:]
	return piece
}

// number reads one of so many bytes.
func (r *stateReader) number(bytes uint64) uint64 {
	var b [8]byte
	copy(b[:], r.cut(bytes, bytes))
	return binary.LittleEndian.Uint64(b[:])
}
