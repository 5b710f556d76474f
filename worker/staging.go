package worker

import (
	"sync"
	"unsafe"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// Staging (decision 103): a large partition that does not lie in the arena is copied there when it leaves, and its sum from there when that has come. To a server of
// this host it then is memory that is lent. Where there is no room, because the others are late, partitions travel through the connection as ever: who waits for room
// would wait for other ranks, which may wait for this one.

// stageBytes is from how many bytes on a partition is staged: two messages for a place cost more than little memory.
const stageBytes = 32 << 10

// stageIn is the memory for that, one for all servers, as they map the same arena.
func (e *Engine) stageIn(a transport.Arena) *mempool.Pool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.staging == nil {
		e.staging = mempool.New(limits.MaxStaged)
		e.staging.Make = a.Alloc
		e.staging.Drop = func(b []byte) { a.Free(unsafe.Pointer(unsafe.SliceData(b))) }
	}
	return e.staging
}

// stage is one partition there.
type stage struct {
	memory []byte
	place  [wire.PlaceSize]byte
}

// stages are those that are not in use.
var stages = sync.Pool{New: func() any { return new(stage) }}

// stage makes room for a partition that is about to leave; nil where it travels.
func (f *traffic) stage(t *task) *stage {
	t.staged = false
	if f.arena == nil || f.staging == nil || f.broken || len(t.in) < stageBytes || !t.lendable() || t.placed {
		return nil
	}
	b, err := f.staging.Spare(len(t.in))
	if err != nil {
		return nil
	}
	at, ok := within(f.arena.Memory(), b)
	if !ok {
		f.staging.Put(b)
		return nil
	}
	s := stages.Get().(*stage)
	s.memory = b
	place := wire.Place{Input: at, Output: at, Length: uint64(len(b))}
	place.Append(s.place[:0])
	t.staged = true
	f.stages[idOf(&t.h)] = s
	return s
}

// frame is what leaves in the place of a task's partition. The partition itself is copied behind the lock.
func (s *stage) frame(t *task) outbox.Frame {
	h := t.h
	h.Flags |= wire.FlagInPlace
	return outbox.Frame{Header: h, Payload: s.place[:], Owner: t}
}

// unstage ends what is staged for a push that the server is done with, and brings the answer to its task; nil where nobody waits for it. An answer that is kept stays
// where it is.
func (p *peer) unstage(s *stage, h *wire.Header, t *task) {
	answers := t != nil && h.Type == wire.TypeResult && h.Flags&(wire.FlagInPlace|wire.FlagEmpty) == wire.FlagInPlace
	if answers {
		copy(t.out, s.memory)
	}
	if answers && p.e.kept.keeps(t) {
		t.sum = s.memory
	} else {
		p.traffic.staging.Put(s.memory)
	}
	s.memory = nil
	stages.Put(s)
}

// abandonStaging leaves to the servers what they may still write, now that nobody hears from them any more. The rest of the memory goes back.
func (e *Engine) abandonStaging() {
	if e.staging == nil {
		return
	}
	e.kept.reset()
	e.each(func(w way) {
		if p, ok := w.(*peer); ok {
			p.abandonStages()
		}
	})
	e.staging.Release()
}

// abandonStages leaves to the server what it may still read and write: in an elastic job a server that one rank has lost may be summing for the others.
func (p *peer) abandonStages() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.traffic.stages {
		p.traffic.arena.Abandon(unsafe.Pointer(unsafe.SliceData(s.memory)))
	}
	clear(p.traffic.stages)
}

// lendable reports whether a task's partition may be summed where it lies, in memory that the server has mapped.
func (t *task) lendable() bool {
	return t.answer && t.h.Type == wire.TypePush && t.h.Codec == wire.CodecPlain && t.o.Kind == units.Allreduce && !t.o.beside && !t.encode
}
