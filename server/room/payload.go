package room

import (
	"github.com/paceline/paceline/internal/mempool"
)

// ChunkBytes is how much of a payload is read before it is added: little enough to be still in the core's own cache,
// and a multiple of every element size.
const ChunkBytes = 256 << 10

// Payload is what is left of a request's bytes: on a connection, or in memory. What a room leaves, the shell discards.
type Payload struct {
	source  Source
	scratch []byte // ChunkBytes for what comes from source
	memory  []byte
	lasting bool // memory stays as it is until the reply
	left    int
}

// Source is what payloads are read from.
type Source interface {
	// ReadPayload fills b with the next bytes.
	ReadPayload(b []byte) error
}

// Stream is a payload of n bytes that is read chunk by chunk, into scratch.
func Stream(s Source, scratch []byte, n int) Payload {
	return Payload{source: s, scratch: scratch, left: n}
}

// Memory is a payload that may be read until the request has been served.
func Memory(b []byte) Payload { return Payload{memory: b, left: len(b)} }

// Lasting is a payload that may be read where it lies until the reply: a tensor of the worker in this process.
func Lasting(b []byte) Payload { return Payload{memory: b, lasting: len(b) > 0, left: len(b)} }

// Len is the number of bytes that are left.
func (p *Payload) Len() int { return p.left }

// InPlace is the whole payload where there is one that may be read in place until the reply.
func (p *Payload) InPlace() (b []byte, ok bool) { return p.memory, p.lasting }

// Next gives the next n bytes, at most ChunkBytes where they come from a connection. They are valid until the next call.
func (p *Payload) Next(n int) ([]byte, error) {
	p.left -= n
	if p.source == nil || n == 0 {
		b := p.memory[:n]
		p.memory = p.memory[n:]
		return b, nil
	}
	b := p.scratch[:n]
	return b, p.source.ReadPayload(b)
}

// Lend gives what is left in lent memory, which the caller puts back. Where there is none the error is a MemoryError,
// and nothing has been read.
func (p *Payload) Lend(pool *mempool.Pool) ([]byte, error) {
	b, err := pool.Get(p.left)
	if err != nil {
		return nil, MemoryError{err}
	}
	if err := p.Into(b); err != nil {
		pool.Put(b)
		return nil, err
	}
	return b, nil
}

// Whole gives what is left, valid until the next call: where it lies, as one chunk, or else in lent memory, which is the
// caller's to put back. Errors are those of Lend.
func (p *Payload) Whole(pool *mempool.Pool) (b, lent []byte, err error) {
	if p.source == nil || p.left <= ChunkBytes {
		b, err = p.Next(p.left)
		return b, nil, err
	}
	lent, err = p.Lend(pool)
	return lent, lent, err
}

// Into fills b, as long as what is left, with it.
func (p *Payload) Into(b []byte) error {
	p.left -= len(b)
	if p.source == nil {
		copy(b, p.memory)
		return nil
	}
	return p.source.ReadPayload(b)
}

// Discard reads what is left and forgets it.
func (p *Payload) Discard() error {
	for p.left > 0 {
		if _, err := p.Next(min(p.left, ChunkBytes)); err != nil {
			return err
		}
	}
	return nil
}
