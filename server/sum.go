package server

import (
	"slices"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// The bytes of a slot: how contributions get into the accumulator, and the result out of it. When, key.go says.

// chunks is how many pieces are added each by itself; a message is one.
func (k *key) chunks() int {
	if k.coding != nil {
		return 1
	}
	return (k.bytes + room.ChunkBytes - 1) / room.ChunkBytes
}

func (k *key) accBytes() int {
	if k.coding != nil {
		return 4 * k.coding.elements
	}
	return reduce.AccBytes(k.t.Type, k.bytes)
}

// stream adds the payload chunk by chunk while it arrives.
func (k *key) stream(s *slot, h *wire.Header, p *room.Payload) error {
	for i := range s.chunks {
		b, err := p.Next(min(p.Len(), room.ChunkBytes))
		if err != nil {
			return err
		}
		k.mu.Lock()
		if k.slots[h.Iteration] == s && !s.closed { // else it was given up, or closed without this rank
			k.add(s, i, int(h.Rank), b)
		}
		k.mu.Unlock()
	}
	return nil
}

// add adds one whole chunk of a rank, and with it the local worker's if that waits. Callers hold mu.
func (k *key) add(s *slot, i, rank int, b []byte) {
	t, c, acc := k.t, &s.chunks[i], k.accChunk(s, i)
	if c.from.Len() > 0 {
		reduce.Add(t.Reduce, t.Type, acc, b, t.Prescale)
	} else if l := s.local; l != nil && l.rank != rank {
		reduce.Load2(t.Reduce, t.Type, acc, k.chunkOf(l.in, i), b, t.Prescale)
		c.from.Add(l.rank)
	} else {
		reduce.Load(t.Type, acc, b, t.Prescale)
	}
	c.from.Add(rank)
	if l := s.local; l != nil && c.from.Add(l.rank) {
		reduce.Add(t.Reduce, t.Type, acc, k.chunkOf(l.in, i), t.Prescale)
	}
}

// addLocal adds the local worker's push where others have been added. The rest is added together
// with the first of them, in one pass. Callers hold mu.
func (k *key) addLocal(s *slot, all bool) {
	for i := range s.chunks {
		c := &s.chunks[i]
		if c.from.Has(s.local.rank) || c.from.Len() == 0 && !all {
			continue
		}
		if c.from.Len() == 0 {
			reduce.Load(k.t.Type, k.accChunk(s, i), k.chunkOf(s.local.in, i), k.t.Prescale)
		} else {
			reduce.Add(k.t.Reduce, k.t.Type, k.accChunk(s, i), k.chunkOf(s.local.in, i), k.t.Prescale)
		}
		c.from.Add(s.local.rank)
	}
}

func (k *key) chunkOf(b []byte, i int) []byte {
	return b[i*room.ChunkBytes : min((i+1)*room.ChunkBytes, k.bytes)]
}

func (k *key) accChunk(s *slot, i int) []byte {
	n := reduce.AccBytes(k.t.Type, room.ChunkBytes)
	return s.acc[i*n : min((i+1)*n, len(s.acc))]
}

// keep reads the whole payload into a buffer of its own.
func (k *key) keep(s *slot, h *wire.Header, p *room.Payload) error {
	b, ok, err := k.read(h, p)
	if ok {
		k.contribute(s, h, b)
	}
	return err
}

// read reads the payload into lent memory. Where there is none, every rank hears of it.
func (k *key) read(h *wire.Header, p *room.Payload) (b []byte, ok bool, err error) {
	if b, err = k.t.r.s.pool.Get(p.Len()); err != nil {
		k.t.OutOfMemory(h, room.MemoryError{Err: err})
		return nil, false, p.Discard()
	}
	if err := p.Into(b); err != nil {
		k.t.r.s.pool.Put(b)
		return nil, false, err
	}
	return b, true, nil
}

func (k *key) contribute(s *slot, h *wire.Header, b []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.slots[h.Iteration] != s || s.closed { // it was given up, or closed without this rank
		k.t.r.s.pool.Put(b)
		return
	}
	s.contrib[int(h.Rank)] = b
}

// total makes the result of the contributions.
func (k *key) total(s *slot, o condition.Output) error {
	if k.nothing(s, o.Contributors) {
		k.t.r.s.pool.Put(s.acc)
		k.dropContrib(s)
		s.acc, s.result = nil, newResult(k.t.r, nil)
		return nil
	}
	switch {
	case k.t.Whole && k.coding != nil:
		if err := k.combineMessages(s, o.Contributors); err != nil {
			return err
		}
		k.fillEmpty(s)
	case k.t.Whole:
		k.combine(s, o.Contributors)
	default:
		if s.local != nil {
			k.addLocal(s, true)
		}
		k.fillEmpty(s)
	}
	if k.coding != nil {
		return k.storeMessage(s, o.Progress)
	}
	k.store(s)
	return nil
}

// nothing reports whether the answer is zeros that need not be sent: all that has come is empty, and no residual is
// kept of earlier answers.
func (k *key) nothing(s *slot, contributors rankset.Set) bool {
	if k.bytes == 0 || k.coding != nil || s.local != nil {
		return false
	}
	for rank := range s.contrib {
		if contributors.Has(rank) {
			return false
		}
	}
	return !slices.ContainsFunc(s.chunks, func(c chunk) bool { return c.from.Len() > 0 })
}

// fillEmpty makes zeros of what nobody had anything to add to.
func (k *key) fillEmpty(s *slot) {
	for i := range s.chunks {
		switch {
		case s.chunks[i].from.Len() > 0:
		case k.coding != nil:
			clear(s.acc)
		default:
			clear(k.accChunk(s, i))
		}
	}
}

// store scales the accumulator and narrows it to the tensor's type.
func (k *key) store(s *slot) {
	t := k.t
	mul, div := t.Postscale, t.divide(s.divisor)
	s.result = newResult(t.r, s.acc)
	if reduce.AccType(t.Type) == t.Type {
		reduce.Store(t.Type, s.acc, s.acc, mul, div)
	} else {
		reduce.Store(t.Type, s.acc[:k.bytes], s.acc, mul, div)
		s.result.buf = s.acc[:k.bytes]
	}
	s.acc = nil
}

// combine makes the sum of the contributors' whole contributions, in rank order.
func (k *key) combine(s *slot, contributors rankset.Set) {
	t := k.t
	if l := s.local; l != nil {
		s.contrib[l.rank] = l.in
	}
	var parts [][]byte
	for _, rank := range t.Ranks {
		if b, ok := s.contrib[rank]; ok && contributors.Has(rank) {
			parts = append(parts, b)
		}
	}
	switch {
	case len(parts) == 0:
		clear(s.acc)
	case t.Reduce == units.Adasum:
		// Adasum of scaled gradients is the scaled Adasum, so both scales wait for the end.
		reduce.Adasum(t.Type, s.acc, parts)
		reduce.Load(reduce.AccType(t.Type), s.acc, s.acc, t.Prescale)
	default:
		for i, b := range parts {
			if i == 0 {
				reduce.Load(t.Type, s.acc, b, t.Prescale)
			} else {
				reduce.Add(t.Reduce, t.Type, s.acc, b, t.Prescale)
			}
		}
	}
	k.dropContrib(s)
}

func (k *key) dropContrib(s *slot) {
	for rank, b := range s.contrib {
		if s.local == nil || rank != s.local.rank {
			k.t.r.s.pool.Put(b)
		}
	}
	s.contrib = nil
}

// divide is what a sum of so many contributions is divided by.
func (t *tensor) divide(ranks uint32) float64 {
	if t.Reduce == units.Average {
		return float64(ranks)
	}
	return 1
}
