// Package mempool lends and accounts for large byte buffers. It keeps returned buffers for the next borrower,
// up to a bound, because fresh memory costs a page fault every 4 KiB.
package mempool

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"time"
)

const (
	minClass = 12 // buffers are powers of two from 4 KiB …
	maxClass = 30 // … to 1 GiB (limits.MaxPayload)
	// wideClass bounds the internal waste of 16-bit tensors summed in float32: twice MaxPayload.
	wideClass = maxClass + 1
)

// Pool lends buffers. Its methods may be called from any goroutine.
//
// Invariants: lent + kept ≤ limit whenever Get has returned without an error; kept counts exactly
// the bytes in free.
type Pool struct {
	limit int64

	// Evict, if set before the first use, is called when memory is short. It puts back expendable buffers and
	// reports whether there were any. The callers of Get may hold locks of their own.
	Evict func() bool

	// Make and Drop, if set before the first use, replace Go's memory: Make gives nil where there is none. They cost so much that a
	// larger buffer is lent rather than dropped.
	Make func(bytes int) []byte
	Drop func(b []byte)

	mu   sync.Mutex
	lent int64
	kept int64
	free [wideClass + 1][][]byte
	idle [wideClass + 1]int // how many of each class have been kept at all times since Rest
}

// New makes a pool that lends and keeps at most limit bytes in all.
func New(limit int64) *Pool { return &Pool{limit: limit} }

// Get lends a buffer of n bytes with arbitrary content. It fails when the limit would be exceeded even after
// eviction.
func (p *Pool) Get(n int) ([]byte, error) {
	b, err := p.Spare(n)
	for err != nil && p.Evict != nil && p.Evict() {
		b, err = p.Spare(n)
	}
	return b, err
}

// Spare is Get for expendable buffers: it evicts nothing.
func (p *Pool) Spare(n int) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	class := classOf(n)
	size := int64(1) << class
	p.mu.Lock()
	defer p.mu.Unlock()
	if class > wideClass {
		return nil, fmt.Errorf("%d bytes requested at once, limit %d", n, int64(1)<<wideClass)
	}
	if b := p.keptOf(class, class, n); b != nil {
		return b, nil
	}
	if p.Drop != nil && p.lent+p.kept+size > p.limit {
		if b := p.keptOf(class+1, wideClass, n); b != nil {
			return b, nil
		}
	}
	if p.lent+size > p.limit {
		return nil, fmt.Errorf("%d bytes requested, %d of %d in use", n, p.lent, p.limit)
	}
	p.trim(p.limit - p.lent - size)
	b, err := p.make(int(size))
	if err != nil {
		return nil, err
	}
	p.lent += size
	return b[:n], nil
}

// keptOf lends n bytes of the smallest buffer that is kept of these classes, nil where there is none.
func (p *Pool) keptOf(from, to, n int) []byte {
	for class := from; class <= to; class++ {
		if l := len(p.free[class]); l > 0 {
			b := p.free[class][l-1]
			p.free[class] = p.free[class][:l-1]
			p.idle[class] = min(p.idle[class], l-1)
			p.kept -= 1 << class
			p.lent += 1 << class
			return b[:n]
		}
	}
	return nil
}

func (p *Pool) make(size int) ([]byte, error) {
	if p.Make == nil {
		return make([]byte, size), nil
	}
	if b := p.Make(size); b != nil {
		return b, nil
	}
	return nil, fmt.Errorf("no memory of %d bytes is left", size)
}

// Put takes back what Get lent.
func (p *Pool) Put(b []byte) {
	if cap(b) == 0 {
		return
	}
	p.mu.Lock()
	p.lent -= int64(cap(b))
	p.keep(b)
	p.mu.Unlock()
}

// keep notes a buffer for the next borrower.
func (p *Pool) keep(b []byte) {
	p.kept += int64(cap(b))
	class := classOf(cap(b))
	p.free[class] = append(p.free[class], b[:cap(b)])
}

// Charge accounts for n bytes that the caller takes from elsewhere: what it notes about those who wait. It fails as Get
// does.
func (p *Pool) Charge(n int) error {
	for !p.charge(int64(n)) {
		if p.Evict == nil || !p.Evict() {
			return fmt.Errorf("%d bytes requested, %d of %d in use", n, p.Lent(), p.limit)
		}
	}
	return nil
}

func (p *Pool) charge(n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lent+n > p.limit {
		return false
	}
	p.trim(p.limit - p.lent - n)
	p.lent += n
	return true
}

// Refund takes back what Charge accounted for.
func (p *Pool) Refund(n int) {
	p.mu.Lock()
	p.lent -= int64(n)
	p.mu.Unlock()
}

// Cede ends the account of what Get lent, which is the borrower's to keep from now on, or until Regain.
func (p *Pool) Cede(b []byte) { p.Refund(cap(b)) }

// Regain takes back what was ceded: it is kept where there is room, else dropped.
func (p *Pool) Regain(b []byte) {
	if cap(b) == 0 {
		return
	}
	p.mu.Lock()
	p.keep(b)
	p.trim(p.limit - p.lent)
	p.mu.Unlock()
}

// Release frees every buffer that is not lent.
func (p *Pool) Release() {
	p.mu.Lock()
	p.trim(0)
	p.mu.Unlock()
}

// RestPeriod is how often to call Rest.
const RestPeriod = time.Minute

// Rest frees what nobody has borrowed since the call before: much is needed once, such as when parameters are broadcast.
func (p *Pool) Rest() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for class := range p.free {
		n := p.idle[class] // the first ones: the last is lent first
		for _, b := range p.free[class][:n] {
			p.freed(b)
		}
		p.free[class] = slices.Delete(p.free[class], 0, n)
		p.idle[class] = len(p.free[class])
	}
}

// Lent is the number of bytes in use.
func (p *Pool) Lent() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lent
}

// trim drops kept buffers, largest first, until at most bound bytes are kept.
func (p *Pool) trim(bound int64) {
	for class := wideClass; class >= minClass && p.kept > bound; class-- {
		for len(p.free[class]) > 0 && p.kept > bound {
			last := len(p.free[class]) - 1
			p.freed(p.free[class][last])
			p.free[class][last] = nil
			p.free[class] = p.free[class][:last]
			p.idle[class] = min(p.idle[class], last)
		}
	}
}

// freed notes that a buffer is kept no longer.
func (p *Pool) freed(b []byte) {
	if p.Drop != nil {
		p.Drop(b)
	}
	p.kept -= int64(cap(b))
}

func classOf(n int) int {
	return max(minClass, bits.Len64(uint64(n-1)))
}
