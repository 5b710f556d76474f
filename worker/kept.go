package worker

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// kept is the last result of each key of an elastic job, as it came: when its server is lost, a rank that has not got it gets it from this
// one. The next result of the key replaces it: then every rank has pushed since, so every rank had it. Of a held value it is the newest that this
// rank has, with what that covers: every answer comes after this rank's own push, so that nothing else of this rank is needed but what waits for an answer.
type kept struct {
	pool *mempool.Pool

	mu      lockorder.Mutex
	results map[keyOf]*result // nil in a job that is not elastic
	given   map[keyOf]given   // values that servers give away, of which something is still to come

	residuals map[keyOf][]residual // that this rank carries to where their keys are, ahead of its next pushes, and of its questions for them
	carries   atomic.Int32         // of how many keys these are, for those who have not the lock
}

// residual is that of a key's answers, which a server has handed on. It is kept until another one says that it has it.
type residual struct {
	elements []byte
	with     int        // the server that it is on its way to, or has come from where that is about to leave, and takes nothing any more; -1 for none
	sent     bool       // it is on its way
	flags    wire.Flags // FlagCopy, or none
}

// given is what a server gives of a held value that has been moved to another one.
type given struct {
	cover   *cover // nil for what has not come, as the message
	message []byte
}

// cover is what a held value has in it, as a server has said. It does not change.
type cover struct {
	wire.Cover
	encoded    []byte
	operations uint64 // of all ranks: by that one value is newer than another
}

// readCover decodes a cover, and copies it.
func readCover(b []byte) (*cover, error) {
	c := &cover{encoded: slices.Clone(b)}
	err := c.Decode(b)
	for _, r := range c.Ranks {
		c.operations += r.Next
	}
	return c, err
}

type keyOf struct{ tensor, part uint32 }

// result is an answer that is kept.
type result struct {
	d       *declaration
	h       wire.Header // of the frame that supplies it
	cover   *cover      // of a held value; else nil
	server  int         // from which it came
	message []byte
	pool    *mempool.Pool // that the message goes back to
	lent    bool          // a frame that has not left reads it, in memory of no pool

	sentBack int // how often a server has sent it away
}

// keeps reports whether the answer to a task is kept.
func (k *kept) keeps(t *task) bool {
	return k.results != nil && (t.h.Type == wire.TypePush || t.o.Kind == units.Accumulate && t.h.Type == wire.TypePull)
}

// keep keeps the answer of a server to a task. A message that a pool has lent is the keeper's, another one is copied. A held value that the server has given
// away before is returned, to be supplied to another.
func (k *kept) keep(t *task, h *wire.Header, server int, message []byte, lender *mempool.Pool) (given *result, err error) {
	if t.o.Kind == units.Accumulate && t.cover == nil {
		return nil, fmt.Errorf("partition %d of %q on rank %d: server %d answers without saying what the value covers", h.Part, t.o.name(), t.h.Rank, server)
	}
	if lender == nil && len(message) > 0 {
		b, err := k.pool.Get(len(message))
		if err != nil {
			return nil, err
		}
		copy(b, message)
		message, lender = b, k.pool
	}
	if len(message) > 0 {
		lender.Cede(message)
	}
	r := &result{d: t.o.d, server: server, message: message, pool: lender, h: wire.Header{
		Type: wire.TypeSupply, Flags: h.Flags&(wire.FlagEmpty|wire.FlagAuthenticated) | t.h.Flags&wire.FlagHome, DType: h.DType, Codec: h.Codec,
		Epoch: t.h.Epoch, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Seq: h.Seq, Rank: t.h.Rank, Divisor: h.Divisor, Before: t.h.Before,
	}}
	id := keyOf{h.Tensor, h.Part}
	k.mu.Lock()
	defer k.mu.Unlock()
	before := k.results[id]
	if t.o.Kind == units.Accumulate {
		r.ofValue(t, before)
		if before != nil && before.isNewer(r) {
			r, before = before, r
		}
	}
	k.results[id] = r
	k.release(before)
	return k.settle(id), nil
}

// covers notes what a held value covers that a server is about to give away.
func (k *kept) covers(id keyOf, cover *cover) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.given[id] = given{cover: cover}
}

// gives takes a held value, and its memory, that a server gives away. It is returned, to be supplied to another, unless the answer comes later that its rank had
// from that server before.
func (k *kept) gives(id keyOf, message []byte) (*result, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	g := k.given[id]
	if g.cover == nil {
		return nil, errors.New("it has not said what the value covers")
	}
	g.message = message
	k.given[id] = g
	return k.settle(id), nil
}

// carry takes a residual that a server hands on.
func (k *kept) carry(id keyOf, r residual) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.hold(id, append(k.residuals[id], r))
}

// hold notes what is carried to a key.
func (k *kept) hold(id keyOf, all []residual) {
	if k.residuals[id] = all; len(all) == 0 {
		delete(k.residuals, id)
	}
	k.carries.Store(int32(len(k.residuals)))
}

// carried is a residual that leaves for a key at a server now, with the flags of its frame; nil for none. It is not ok where that has more bytes than the limit.
func (k *kept) carried(id keyOf, server, limit int) (elements []byte, flags wire.Flags, ok bool) {
	if k.carries.Load() == 0 {
		return nil, 0, true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.residuals[id] {
		r := &k.residuals[id][i]
		if r.sent || r.with == server {
			continue
		}
		if len(r.elements) > limit {
			return nil, 0, false
		}
		r.with, r.sent = server, true
		return r.elements, r.flags, true
	}
	return nil, 0, true
}

// arrived forgets a residual that was on its way to a server, which has it, or sends it back.
func (k *kept) arrived(id keyOf, server int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := k.residuals[id]
	if i := slices.IndexFunc(all, func(r residual) bool { return r.sent && r.with == server }); i >= 0 {
		k.hold(id, slices.Delete(all, i, i+1))
	}
}

// left are the keys of residuals that a server which has gone has handed on, or has not taken; these are lost with one that was not drained.
func (k *kept) left(server int, drained bool) (ids []keyOf) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, all := range k.residuals {
		all = slices.DeleteFunc(all, func(r residual) bool { return r.with == server && r.sent && !drained })
		for i := range all {
			if r := &all[i]; r.with == server {
				r.with, r.sent = -1, false
				ids = append(ids, id)
			}
		}
		k.hold(id, all)
	}
	return ids
}

// settle makes a value that a server has given away the newest of its key.
func (k *kept) settle(id keyOf) *result {
	before, g := k.results[id], k.given[id]
	if before == nil || g.message == nil {
		return nil
	}
	delete(k.given, id)
	r := &result{d: before.d, h: before.h, server: before.server, cover: g.cover, message: g.message, lent: true}
	r.h.Codec = wire.CodecSummed
	k.results[id] = r
	k.release(before)
	return r
}

// isNewer reports whether a held value is newer than another. Of two that cover the same one is, if it was given away: it is exact, and goes on elsewhere.
func (r *result) isNewer(other *result) bool {
	mine, theirs := r.cover.operations, other.cover.operations
	return mine > theirs || mine == theirs && r.h.Codec == wire.CodecSummed
}

// ofValue makes it the newest of a held value. What the home server of the name has to know is that its declaration is over.
func (r *result) ofValue(t *task, before *result) {
	r.cover = t.cover
	h := &r.h
	h.Flags, h.Codec, h.Divisor = h.Flags&wire.FlagAuthenticated, wire.CodecPlain, 0
	h.Iteration, h.Seq, h.Before = 0, t.h.Seq, t.o.d.had()
	switch {
	case t.h.Flags&wire.FlagDeclare != 0:
		h.Flags |= t.h.Flags & wire.FlagHome
	case before != nil:
		h.Seq, h.Flags = before.h.Seq, h.Flags|before.h.Flags&wire.FlagHome
	}
}

// release gives the memory of a result back, unless a frame reads it.
func (k *kept) release(r *result) {
	if r != nil && !r.lent && len(r.message) > 0 {
		r.pool.Regain(r.message)
	}
}

// moved are the results of keys that are not where they came from any more, as if they came from where they are now, and lent for good.
func (k *kept) moved(place func(r *result) int) (all []*result) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.results {
		if to := place(r); to != r.server {
			if !r.lent && r.pool != k.pool { // of the arena, which would be short of it
				message := slices.Clone(r.message)
				k.release(r)
				r.message = message
			}
			r.lent, r.server = true, to
			all = append(all, r)
		}
	}
	return all
}

// pushed is how many iterations of a held value its newest answer says that a rank has pushed; none where it has not come.
func (k *kept) pushed(id keyOf, rank int) uint64 {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.results[id]
	if r == nil || r.cover == nil {
		return math.MaxUint64
	}
	for _, of := range r.cover.Ranks {
		if int(of.Rank) == rank {
			return of.Pushed
		}
	}
	return 0
}

// sentBack is the result of an iteration that was supplied to a server, if it is still the last one of its key, and how often one has sent it back.
func (k *kept) sentBack(id keyOf, server int, iteration uint64) (r *result, times int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r := k.results[id]; r != nil && r.lent && r.server == server && r.h.Iteration == iteration {
		r.sentBack++
		return r, r.sentBack
	}
	return nil, 0
}

// relocate notes that a result is supplied to another server than before, and reports whether it still is the last one of its key.
func (k *kept) relocate(r *result, from, to int) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	last := k.results[keyOf{r.h.Tensor, r.h.Part}] == r && r.server == from
	if last {
		r.server = to
	}
	return last
}

// spend lets the bytes of a tensor's results go that every rank has, from a partition on. They stay results: of each key all ranks supply the last, or none.
func (k *kept) spend(d *declaration, from int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for part := from; part < len(d.t.Parts); part++ {
		id := keyOf{d.t.ID, uint32(part)}
		if r := k.results[id]; r != nil && len(r.message) > 0 {
			k.release(r)
			spent := *r
			spent.message, spent.lent = nil, false
			spent.h.Flags |= wire.FlagEmpty
			k.results[id] = &spent
		}
	}
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
	maps.DeleteFunc(k.given, func(id keyOf, _ given) bool { return id.tensor == tensor })
	maps.DeleteFunc(k.residuals, func(id keyOf, _ []residual) bool { return id.tensor == tensor })
	k.carries.Store(int32(len(k.residuals)))
}

// reset forgets every result.
func (k *kept) reset() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, r := range k.results {
		k.release(r)
	}
	clear(k.results)
	clear(k.given)
	clear(k.residuals)
	k.carries.Store(0)
}

// frames supply a result.
func (r *result) frames() []outbox.Frame {
	frame := outbox.Frame{Header: r.h, Payload: r.message}
	if r.cover == nil {
		return []outbox.Frame{frame}
	}
	h := r.h
	h.Type, h.Flags, h.DType = wire.TypeCover, 0, 0
	return []outbox.Frame{{Header: h, Payload: r.cover.encoded}, frame}
}
