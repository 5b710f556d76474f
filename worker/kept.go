package worker

import (
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// kept is the last result of each key of an elastic job, as it came: when its server is lost, a rank that has not got it gets it from this
// one. The next result of the key replaces it: then every rank has pushed since, so every rank had it.
type kept struct {
	pool *mempool.Pool

	mu      lockorder.Mutex
	results map[keyOf]*result // nil in a job that is not elastic
}

type keyOf struct{ tensor, part uint32 }

// result is an answer that is kept.
type result struct {
	d       *declaration
	h       wire.Header // of the frame that supplies it
	server  int         // from which it came
	message []byte
	lent    bool // a frame that has not left reads it
}

// keeps reports whether the answer to a task is kept.
func (k *kept) keeps(t *task) bool {
	return k.results != nil && t.h.Type == wire.TypePush && t.o.Kind != units.Accumulate
}

// keep keeps the answer of a server to a task. Where message is not lent it is copied; else its memory is the keeper's.
func (k *kept) keep(t *task, h *wire.Header, server int, message []byte, lent bool) error {
	if !lent && len(message) > 0 {
		b, err := k.pool.Get(len(message))
		if err != nil {
			return err
		}
		copy(b, message)
		message = b
	}
	r := &result{d: t.o.d, server: server, message: message, h: wire.Header{
		Type: wire.TypeSupply, Flags: h.Flags&(wire.FlagEmpty|wire.FlagAuthenticated) | t.h.Flags&wire.FlagHome, DType: h.DType, Codec: h.Codec,
		Epoch: t.h.Epoch, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Seq: h.Seq, Rank: t.h.Rank, Divisor: h.Divisor, Before: t.h.Before,
	}}
	id := keyOf{h.Tensor, h.Part}
	k.mu.Lock()
	before := k.results[id]
	k.results[id] = r
	k.mu.Unlock()
	k.release(before)
	return nil
}

// release gives the memory of a result back, unless a frame reads it.
func (k *kept) release(r *result) {
	if r != nil && !r.lent && len(r.message) > 0 {
		k.pool.Put(r.message)
	}
}

// of are the results that came from a server, as if they came from the heirs of their keys, and lent for good.
func (k *kept) of(server int, heir func(r *result) int) (all []*result) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.results {
		if r.server == server {
			r.lent, r.server = true, heir(r)
			all = append(all, r)
		}
	}
	return all
}

// forget forgets the results of a tensor that is declared anew.
func (k *kept) forget(tensor uint32) {
	if k.results == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, r := range k.results {
		if id.tensor == tensor {
			delete(k.results, id)
			k.release(r)
		}
	}
}

// reset forgets every result.
func (k *kept) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.results {
		k.release(r)
	}
	clear(k.results)
}

// frame supplies a result.
func (r *result) frame() outbox.Frame { return outbox.Frame{Header: r.h, Payload: r.message} }
