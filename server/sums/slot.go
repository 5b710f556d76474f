package sums

import (
	"cmp"
	"slices"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
)

// slot is one iteration of a key.
//
// Invariants: while open, acc holds for each chunk the sum of exactly the ranks in that chunk's set;
// a rank's bytes are added a whole chunk at a time or not at all (of a coded tensor, a whole message). Once closed, result is what every
// rank gets, the same bytes for all.
type slot struct {
	*room.Part
	acc           []byte
	chunks        []chunk
	contributions map[int][]byte // whole tensors: by rank, lent; only then
	lent          []lent         // pushes that are read where they lie: of the worker in this process, and of ranks that lend their memory
	waiters       []waiter
	owed          int         // ranks that will still be answered
	started       rankset.Set // ranks whose push has begun to arrive
	came          rankset.Set // those whose push has arrived whole, in an elastic job
	absent        rankset.Set // live ranks that a closed iteration did without (drop-stragglers) and that are still to come for its sum;
	// the condition sees to it that no more than limits.MaxKept sums wait
	seq     uint64 // count of the operation under its name, for failures
	last    int    // the rank whose push arrived last
	closed  bool
	divisor uint32
	result  *room.Buffer
	placed  bool  // the result lies where it belongs on every rank, and not in the buffer
	up      climb // of a sum of a host

	supplied bool
	supplier waiter // of the result
}

type chunk struct{ from rankset.Set }

// lent is a tensor that is read where it lies, when it is needed.
type lent struct {
	rank   int
	tensor []byte
	scale  float64
}

// zeros is a chunk of a rank that has joined.
var zeros [room.ChunkBytes]byte

func newSlot(p *room.Part) *slot {
	chunks := (p.Bytes + room.ChunkBytes - 1) / room.ChunkBytes
	if p.Coding != nil { // a message is added whole
		chunks = 1
	}
	return &slot{Part: p, chunks: make([]chunk, chunks)}
}

// begin takes the memory of an iteration.
func (s *slot) begin(seq uint64) error {
	bytes := reduce.AccBytes(s.Type, s.Bytes)
	switch {
	case s.forwards(): // each contribution has its own
		bytes = 0
	case s.Coding != nil:
		bytes = 4 * s.Coding.Elements
	}
	acc, err := s.Round.Pool.Get(bytes)
	if err != nil {
		return room.MemoryError{Err: err}
	}
	s.acc, s.seq = acc, seq
	if s.Whole {
		s.contributions = map[int][]byte{}
	}
	return nil
}

// add adds one whole chunk of a rank, and with it those that are lent and wait.
func (s *slot) add(i, rank int, b []byte) {
	c, acc, scale := &s.chunks[i], s.accChunk(i), s.Scale(rank)
	switch {
	case c.from.Len() > 0:
		reduce.Add(s.Reduce, s.Type, acc, b, scale)
	case len(s.lent) > 0 && s.lent[0].scale == scale:
		reduce.Load2(s.Reduce, s.Type, acc, s.chunkOf(s.lent[0].tensor, i), b, scale)
		c.from.Add(s.lent[0].rank)
	default:
		reduce.Load(s.Type, acc, b, scale)
	}
	c.from.Add(rank)
	s.addLent(i, acc)
}

// addLent adds to a chunk what is lent and is not in it.
func (s *slot) addLent(i int, acc []byte) {
	c := &s.chunks[i]
	if c.from.Len() == 0 {
		if first := s.lent[0]; len(s.lent) > 1 && s.lent[1].scale == first.scale {
			reduce.Load2(s.Reduce, s.Type, acc, s.chunkOf(first.tensor, i), s.chunkOf(s.lent[1].tensor, i), first.scale)
			c.from.Add(s.lent[1].rank)
		} else {
			reduce.Load(s.Type, acc, s.chunkOf(first.tensor, i), first.scale)
		}
		c.from.Add(s.lent[0].rank)
	}
	for _, l := range s.lent {
		if c.from.Add(l.rank) {
			reduce.Add(s.Reduce, s.Type, acc, s.chunkOf(l.tensor, i), l.scale)
		}
	}
}

// lend accepts a push that is lent, which is added where others have been. The rest is added together with the
// first of them, in one pass.
func (s *slot) lend(rank int, tensor []byte) {
	s.lent = append(s.lent, lent{rank, tensor, s.Scale(rank)})
	if s.Whole {
		return
	}
	for i := range s.chunks {
		if s.chunks[i].from.Len() > 0 {
			s.addLent(i, s.accChunk(i))
		}
	}
}

// lentBy is what a rank lends, nil for nothing.
func (s *slot) lentBy(rank int) []byte {
	for _, l := range s.lent {
		if l.rank == rank {
			return l.tensor
		}
	}
	return nil
}

func (s *slot) chunkOf(b []byte, i int) []byte {
	return b[i*room.ChunkBytes : min((i+1)*room.ChunkBytes, s.Bytes)]
}

func (s *slot) accChunk(i int) []byte {
	n := reduce.AccBytes(s.Type, room.ChunkBytes)
	return s.acc[i*n : min((i+1)*n, len(s.acc))]
}

// finish has acc be the sum of all contributors, or reports that it is zeros which need not be sent.
func (s *slot) finish(contributors rankset.Set) (empty bool, err error) {
	defer s.dropContributions()
	switch {
	case s.forwards():
		return false, s.forward(contributors)
	case s.nothing(contributors):
		return true, nil
	case s.Whole && s.Coding != nil:
		err = s.addMessages(contributors)
	case s.Whole:
		s.combine(contributors)
		s.addZeros(contributors)
		return false, nil
	case len(s.lent) > 0:
		for i := range s.chunks {
			s.addLent(i, s.accChunk(i))
		}
	}
	s.fillEmpty()
	s.addZeros(contributors)
	return false, err
}

// zerosMatter reports whether there are zeros of ranks that have joined, which change a minimum, a maximum and a product.
func (s *slot) zerosMatter(contributors rankset.Set) bool {
	matter := s.Reduce == units.Min || s.Reduce == units.Max || s.Reduce == units.Product
	return matter && s.Zeros().Minus(contributors).Len() > 0
}

// addZeros reduces them.
func (s *slot) addZeros(contributors rankset.Set) {
	if !s.zerosMatter(contributors) {
		return
	}
	for i := range s.chunks {
		reduce.Add(s.Reduce, s.Type, s.accChunk(i), zeros[:min(room.ChunkBytes, s.Bytes-i*room.ChunkBytes)], 1)
	}
}

// nothing reports whether the answer is zeros that need not be sent: all that has come is empty, and no residual is
// kept of earlier answers.
func (s *slot) nothing(contributors rankset.Set) bool {
	if s.Bytes == 0 || s.Coding != nil || len(s.lent) > 0 {
		return false
	}
	for rank := range s.contributions {
		if contributors.Has(rank) {
			return false
		}
	}
	return !slices.ContainsFunc(s.chunks, func(c chunk) bool { return c.from.Len() > 0 })
}

// combine makes the sum of the contributors' whole contributions, in rank order.
func (s *slot) combine(contributors rankset.Set) {
	var parts [][]byte
	var scales []float64
	for _, rank := range s.Ranks {
		b, ok := s.contributions[rank]
		if tensor := s.lentBy(rank); tensor != nil {
			b, ok = tensor, true
		}
		if ok && contributors.Has(rank) {
			parts, scales = append(parts, b), append(scales, s.Scale(rank))
		}
	}
	switch {
	case len(parts) == 0:
		clear(s.acc)
	case s.Reduce == units.Adasum:
		// Adasum of scaled gradients is the scaled Adasum, so both scales wait for the end.
		reduce.Adasum(s.Type, s.acc, parts)
		reduce.Load(reduce.AccType(s.Type), s.acc, s.acc, s.Prescale)
	default:
		for i, b := range parts {
			if i == 0 {
				reduce.Load(s.Type, s.acc, b, scales[i])
			} else {
				reduce.Add(s.Reduce, s.Type, s.acc, b, scales[i])
			}
		}
	}
}

// fillEmpty makes zeros of what nobody had anything to add to.
func (s *slot) fillEmpty() {
	for i := range s.chunks {
		switch {
		case s.chunks[i].from.Len() > 0:
		case s.Coding != nil:
			clear(s.acc)
		default:
			clear(s.accChunk(i))
		}
	}
}

// store scales the sum and narrows it to the tensor's type: that is the result.
func (s *slot) store() {
	if s.forwards() {
		s.result, s.acc = room.NewBuffer(s.Round.Pool, s.acc), nil
		return
	}
	s.result = room.NewBuffer(s.Round.Pool, s.acc[:s.Bytes])
	mul, div := s.Rescale(s.divisor)
	reduce.Store(s.Type, s.result.Bytes, s.acc, mul, div)
	s.acc = nil
}

// inPlace reports whether the sum can be written to its ranks where it belongs: all that has come is lent, and all who brought it wait
// for it now.
func (s *slot) inPlace(contributors rankset.Set) bool {
	if len(s.lent) == 0 || len(s.lent) != len(s.waiters) || s.Reduce == units.Adasum || s.Coding != nil || s.Up() ||
		len(s.contributions) > 0 || s.absent.Len() > 0 || s.zerosMatter(contributors) {
		return false
	}
	return !slices.ContainsFunc(s.lent, func(l lent) bool { return !contributors.Has(l.rank) }) && !slices.ContainsFunc(s.chunks, func(c chunk) bool { return c.from.Len() > 0 }) &&
		!slices.ContainsFunc(s.waiters, func(w waiter) bool { return w.memory || len(w.to.Out) != s.Bytes })
}

// storeInPlace makes the sum chunk by chunk, so that each is in the core's cache until it is where it belongs.
func (s *slot) storeInPlace() {
	mul, div := s.Rescale(s.divisor)
	if s.Whole {
		slices.SortFunc(s.lent, func(a, b lent) int { return cmp.Compare(a.rank, b.rank) })
	}
	for i := range s.chunks {
		bytes := len(s.chunkOf(s.lent[0].tensor, i))
		acc := s.acc[:reduce.AccBytes(s.Type, bytes)]
		s.addLent(i, acc)
		reduce.Store(s.Type, acc[:bytes], acc, mul, div)
		for _, w := range s.waiters {
			copy(s.chunkOf(w.to.Out, i), acc[:bytes])
		}
	}
	s.Round.Pool.Put(s.acc)
	s.acc, s.result, s.placed = nil, room.NewBuffer(s.Round.Pool, nil), true
}

// drop lets the memory of an iteration go that has no result.
func (s *slot) drop() {
	s.Round.Pool.Put(s.acc)
	s.dropContributions()
}

func (s *slot) dropContributions() {
	for _, b := range s.contributions {
		s.Round.Pool.Put(b)
	}
	s.contributions = nil
}

// reset makes the slot ready for another iteration.
func (s *slot) reset() {
	for i := range s.chunks {
		s.chunks[i].from.Reset()
	}
	s.started.Reset()
	s.came.Reset()
	s.absent.Reset()
	clear(s.lent)
	*s = slot{Part: s.Part, chunks: s.chunks, lent: s.lent[:0], waiters: s.waiters[:0], started: s.started, came: s.came, absent: s.absent, up: climb{push: s.up.push, abandon: s.up.abandon}}
}
