package server

import (
	"errors"
	"math"
	"sync"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// codedValue is how a held value is read where its tensor is coded. A codec that is precise makes one message of
// each version, for all readers. Of the others a message says too little of a value, and a reader gets the
// difference to what it has:
//
//   - The server keeps for each reading rank the base that the rank has, and encodes value - base.
//   - Both add what the message says to the base, by the same operations, so that the bases stay the same bits.
//   - Each answer has a number, which the rank gives back with its next read as that of its base. Where the
//     server's own says otherwise, because an answer was lost or given up, or its base gave way where memory was
//     short, it sends the value itself, and both start anew with that.
//
// The worker in this process gets the value itself.
type codedValue struct {
	by      codec.Codec // of differences, or of values
	precise bool
	version uint64  // how often the value has changed
	message *result // precise: the value as it is; nil when it has changed since
	bases   map[int]*base
	answers uint32 // numbers of bases that were given out
}

// base is what a rank has of the value: float32 elements, lent.
type base struct {
	mu       sync.Mutex // taken after the value's, while elements are used
	elements []byte     // nil once it has given way
	number   uint32     // guarded by the value's mu
}

// bases are those of all values. They give way to what cannot be done without.
type bases struct {
	mu   sync.Mutex
	all  map[*base]struct{}
	pool *mempool.Pool
}

// giveWay lets go of one that nobody uses now, and reports whether there was one.
func (s *bases) giveWay() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for b := range s.all {
		if b.mu.TryLock() { // never waits: the caller may hold the one that is in use
			s.drop(b)
			b.mu.Unlock()
			return true
		}
	}
	return false
}

// drop takes a base's memory back. Callers hold both mutexes.
func (s *bases) drop(b *base) {
	delete(s.all, b)
	s.pool.Put(b.elements)
	b.elements = nil
}

var errNoBase = errors.New("its base has given way")

// newCodedValue makes it for a value; nil for a plain one.
func newCodedValue(v *value) *codedValue {
	if v.coding == nil {
		return nil
	}
	return &codedValue{by: codec.Difference(v.coding.codec), precise: codec.Precise(v.coding.codec), bases: map[int]*base{}}
}

// unit is what one in the accumulator stands for. Where the share of a difference is a power of two it is that:
// then a message is added as it is, which for a sparse one takes the time of what it says, and the root's value
// is still exact.
func (v *value) unit() float64 {
	if share := v.share(); v.coded != nil && powerOfTwo(share) {
		return share
	}
	return 1
}

func powerOfTwo(f float64) bool {
	part, exponent := math.Frexp(f)
	return part == 0.5 && exponent > -64 && exponent < 64
}

// sumMessage adds what a rank's message says, or nothing where that fails. Callers hold mu.
func (v *value) sumMessage(r *reader, message []byte) error {
	c, pool := v.coding, v.t.r.s.pool
	scale := v.share() / v.unit()
	if scale == 1 && reduce.AccType(v.t.dtype) == units.Float32 {
		if err := c.codec.DecodeAdd(v.acc, message); err != nil {
			return v.t.malformed(v.part, r.rank, err)
		}
		v.outdate()
		return nil
	}
	wide, err := pool.Get(4 * c.elements)
	if err != nil {
		return outOfMemory(err)
	}
	defer pool.Put(wide)
	if err := c.codec.Decode(wide, message); err != nil {
		return v.t.malformed(v.part, r.rank, err)
	}
	reduce.AddFloat32(v.t.dtype, v.acc, wide, scale)
	v.outdate()
	return nil
}

// outdate lets the message of the version before go.
func (c *codedValue) outdate() {
	if c == nil {
		return
	}
	c.version++
	if c.message != nil {
		c.message.Sent(nil)
		c.message = nil
	}
}

// codedReply is the value for a rank that reads it over a connection. Callers hold mu.
func (v *value) codedReply(r *reader) reply {
	c, exact := v.coded, r.h.Flags&wire.FlagPlain != 0
	if !v.room {
		exact = true // there is no value: copy says so
	}
	if c.precise && !exact {
		if err := v.makeMessage(); err == nil {
			c.message.refs.Add(1)
			return reply{reader: *r, res: c.message, codec: wire.CodecDeclared}
		}
	}
	if b := c.bases[r.rank]; b != nil && b.number == r.h.Count && !exact {
		if message, err := v.difference(b); err == nil {
			c.answers++
			b.number = c.answers
			return reply{reader: *r, res: newResult(v.t.r, message), codec: wire.CodecDeclared, base: b.number}
		}
	}
	res, err := v.copy()
	if err != nil || c.precise {
		return reply{reader: *r, res: res, err: err, code: wire.FailMemory}
	}
	return reply{reader: *r, res: res, base: v.rebase(r.rank, res.buf)}
}

// makeMessage encodes the value, once for each version.
func (v *value) makeMessage() error {
	if v.coded.message != nil {
		return nil
	}
	message, err := v.encode(nil)
	if err == nil {
		v.coded.message = newResult(v.t.r, message)
	}
	return err
}

// difference encodes what has changed since a rank's base, and moves the base by what the message says.
func (v *value) difference(b *base) ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.elements == nil {
		return nil, errNoBase
	}
	message, err := v.encode(b.elements)
	if err == nil {
		err = v.coded.by.DecodeAdd(b.elements, message)
	}
	return message, err
}

// encode makes a message of the value, less a base if there is one.
func (v *value) encode(less []byte) ([]byte, error) {
	c, pool := v.coding, v.t.r.s.pool
	wide, err := pool.Get(4 * c.elements)
	if err != nil {
		return nil, err
	}
	defer pool.Put(wide)
	reduce.StoreFloat32(v.t.dtype, wide, v.acc, v.t.Postscale*v.unit())
	if less != nil {
		reduce.Add(units.Sum, units.Float32, wide, less, -1)
	}
	residual, err := pool.Get(v.coded.by.ResidualBytes(c.elements))
	if err != nil {
		return nil, err
	}
	defer pool.Put(residual)
	clear(residual)
	return c.encode(pool, v.coded.by, wide, residual, v.coded.version)
}

// rebase notes that a rank gets the value itself, and gives the number of the base that it is; 0 where there is
// no memory for one.
func (v *value) rebase(rank int, plain []byte) uint32 {
	c, all := v.coded, &v.t.r.s.bases
	b := c.bases[rank]
	if b == nil {
		b = &base{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.elements == nil {
		elements, err := all.pool.Spare(4 * v.coding.elements)
		if err != nil {
			return 0
		}
		b.elements, c.bases[rank] = elements, b
		all.mu.Lock()
		all.all[b] = struct{}{}
		all.mu.Unlock()
	}
	reduce.Widen(v.t.dtype, b.elements, plain)
	c.answers++
	b.number = c.answers
	return b.number
}

// dropBases forgets what some ranks have. Callers hold mu.
func (v *value) dropBases(gone func(rank int) bool) {
	if v.coded == nil {
		return
	}
	all := &v.t.r.s.bases
	for rank, b := range v.coded.bases {
		if gone(rank) {
			b.mu.Lock()
			all.mu.Lock()
			all.drop(b)
			all.mu.Unlock()
			b.mu.Unlock()
			delete(v.coded.bases, rank)
		}
	}
}

// codeOf is how an error is told to the rank.
func codeOf(err error) wire.FailureCode {
	if errors.As(err, new(memoryError)) {
		return wire.FailMemory
	}
	return wire.FailUnsupported
}
