package server

import (
	"fmt"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// key sums one partition of one tensor. The machine decides, the slots hold the bytes.
type key struct {
	decided
	slots map[uint64]*slot // iterations that are open, or closed and not yet answered to all
	spare *slot
}

// slot is one iteration of a key.
//
// Invariants: while open, acc holds for each chunk the sum of exactly the ranks in that chunk's set;
// a rank's bytes are added a whole chunk at a time or not at all (of a coded tensor, a whole message). Once closed, result is what every
// rank gets, the same bytes for all.
type slot struct {
	acc     []byte
	chunks  []chunk
	contrib map[int][]byte // whole tensors: by rank; only then
	local   *localOp       // the push of this process's worker, read from its tensor when it is needed
	waiters []waiter
	owed    int         // ranks that will still be answered
	started rankset.Set // ranks whose push has begun to arrive
	absent  rankset.Set // live ranks that a closed iteration did without (drop-stragglers) and that are still to come for its sum;
	// the condition sees to it that no more than limits.MaxKept sums wait
	seq     uint64 // count of the operation under its name, for failures
	closed  bool
	divisor uint32
	result  *result
}

type chunk struct{ from rankset.Set }

// waiter is a rank that gets the result: over its connection, or in this process.
type waiter struct {
	rank  int
	conn  *conn
	local *localOp
}

// result is the encoded reply, shared by all who send it.
type result struct {
	r    *round
	buf  []byte
	refs atomic.Int32
}

// newResult is a reply that its maker holds.
func newResult(r *round, buf []byte) *result {
	res := &result{r: r, buf: buf}
	res.refs.Store(1)
	return res
}

// Sent implements outbox.Owner: one sender less needs the buffer.
func (res *result) Sent(error) {
	if res.refs.Add(-1) == 0 {
		res.r.s.pool.Put(res.buf)
	}
}

// push adds one rank's partition as it arrives.
func (c *conn) push(h *wire.Header, p *room.Payload) error {
	t, err := c.r.tensor(h)
	if err != nil {
		return err
	}
	if t.Held() {
		return c.add(t, h, p)
	}
	k, err := t.key(h.Part)
	if err != nil {
		return err
	}
	if err := k.fits(h, int(h.Length)); err != nil {
		return err
	}
	if !t.enter(h) {
		return p.Discard()
	}
	s, err := k.open(h)
	if err != nil {
		t.OutOfMemory(h, room.MemoryError{Err: err})
		return p.Discard()
	}
	if s == nil {
		if err := p.Discard(); err != nil {
			return err
		}
		k.late(h, waiter{rank: c.rank, conn: c})
		return nil
	}
	switch {
	case h.Flags&wire.FlagEmpty != 0: // there is nothing to add
	case t.Whole:
		err = k.keep(s, h, p)
	case k.coding != nil:
		err = k.receive(s, h, p)
	default:
		err = k.stream(s, h, p)
	}
	if err != nil {
		return err
	}
	k.pushed(h, s, waiter{rank: c.rank, conn: c})
	return nil
}

// pull asks for a held value.
func (c *conn) pull(h *wire.Header) error {
	t, err := c.r.tensor(h)
	if err != nil {
		return err
	}
	if t.Held() {
		return c.readValue(t, h)
	}
	return fmt.Errorf("pull of %q, which is no value that servers hold", t.Name)
}

// open finds or makes the slot for a push that begins to arrive; nil if the push does not count,
// because its iteration is closed or its rank has begun it before.
func (k *key) open(h *wire.Header) (*slot, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.coding.had(h.Count)
	if s := k.slots[h.Iteration]; s != nil {
		if s.closed || !s.started.Add(int(h.Rank)) {
			return nil, nil
		}
		return s, nil
	}
	if k.t.Gone(h.Iteration) || h.Iteration < k.machine.V() || !k.machine.Live().Has(int(h.Rank)) {
		return nil, nil
	}
	s := k.spare
	k.spare = nil
	if s == nil {
		s = &slot{chunks: make([]chunk, k.chunks())}
	}
	acc, err := k.t.r.s.pool.Get(k.accBytes())
	if err != nil {
		return nil, err
	}
	s.acc, s.seq = acc, h.Seq
	s.started.Add(int(h.Rank))
	if k.t.Whole {
		s.contrib = map[int][]byte{}
	}
	k.slots[h.Iteration] = s
	return s, nil
}

// pushed tells the machine that a rank's push has arrived whole, and does what it says.
func (k *key) pushed(h *wire.Header, s *slot, w waiter) {
	k.mu.Lock()
	if k.slots[h.Iteration] != s {
		k.mu.Unlock()
		w.drop(wire.ErrCancelled)
		return
	}
	answers := k.arrived(h, s, w)
	k.mu.Unlock()
	k.deliver(answers)
}

// arrived is pushed for callers who hold mu.
func (k *key) arrived(h *wire.Header, s *slot, w waiter) (answers []answer) {
	s.absent.Remove(w.rank)
	switch {
	case h.Flags&wire.FlagNoPull == 0:
		s.owed++
		s.waiters = append(s.waiters, w)
		answers = k.step(condition.Pull(w.rank, h.Iteration), answers)
	case w.local != nil && s.local != w.local: // nothing is read from its memory any more
		answers = append(answers, answer{w: w})
	case w.local != nil:
		s.waiters = append(s.waiters, w) // its memory is needed until the iteration is closed
	}
	answers = k.step(condition.Push(w.rank, h.Iteration, h.Significance), answers)
	if s.closed && k.slots[h.Iteration] == s {
		k.release(h.Iteration, s)
	}
	return answers
}

// late takes a push of an iteration that was closed without it: it is counted, and never added, and its rank
// gets the sum that the others have (drop-stragglers).
func (k *key) late(h *wire.Header, w waiter) {
	k.mu.Lock()
	s := k.slots[h.Iteration]
	if s != nil && s.closed && s.absent.Has(w.rank) {
		answers := k.arrived(h, s, w)
		k.mu.Unlock()
		k.deliver(answers)
		return
	}
	k.mu.Unlock()
	w.drop(wire.ErrCancelled)
}

// answer is a reply that is due, to be sent without holding the key.
type answer struct {
	w         waiter
	iteration uint64
	divisor   uint32
	res       *result
	refused   error             // instead of an answer: why the push was not taken, or there is no sum
	code      units.FailureCode // of refused
	seq       uint64
	gone      bool // the iteration of a local waiter was given up
}

// step drives the machine and carries out its outputs on the slots. Callers hold mu.
func (k *key) step(in condition.Input, answers []answer) []answer {
	k.outputs = k.machine.Step(in, k.outputs[:0])
	for _, o := range k.outputs {
		switch o.Kind {
		case condition.Advance:
			answers = k.close(o, answers)
		case condition.Answer:
			answers = k.answer(o, answers)
		case condition.Refuse:
			if o.Rank < 0 { // a change that came too late for those who still take part: the old condition stays
				k.t.r.s.cfg.Log.Warn("conditions stay", zap.String("tensor", k.t.Name), zap.Error(o.Err))
				continue
			}
			a := answer{refused: o.Err, code: units.FailUnsupported}
			if s := k.slots[o.Progress]; s != nil {
				a.seq = s.seq
			}
			answers = append(answers, a)
		}
	}
	if len(k.changes) > 0 {
		return k.turn(answers)
	}
	return answers
}

// close turns the sum into the result.
func (k *key) close(o condition.Output, answers []answer) []answer {
	s := k.slots[o.Progress]
	if s == nil {
		return answers
	}
	t := k.t
	s.closed = true
	// A rank that has joined counts as having pushed zeros, so averages divide by it too (Horovod's rule).
	s.divisor = uint32(len(t.Ranks) - t.ranks.Minus(t.r.joinedRanks()).Minus(o.Contributors).Len())
	if err := k.total(s, o); err != nil {
		return k.spoil(o.Progress, s, err, answers)
	}
	kept := s.waiters[:0]
	for _, w := range s.waiters { // local pushes without a pull were only waiting for their memory
		if w.local != nil && w.local.out == nil && w.local.noPull {
			answers = append(answers, answer{w: w})
			continue
		}
		kept = append(kept, w)
	}
	s.waiters = kept
	s.absent = k.machine.Live().Minus(o.Contributors)
	k.release(o.Progress, s)
	return answers
}

// spoil gives up an iteration of which there is no result: the operation fails on every rank.
func (k *key) spoil(iteration uint64, s *slot, err error, answers []answer) []answer {
	answers = append(answers, answer{refused: err, code: room.CodeOf(err), seq: s.seq})
	for _, w := range s.waiters {
		if w.local != nil {
			answers = append(answers, answer{w: w, gone: true})
		}
	}
	k.t.r.s.pool.Put(s.acc)
	k.dropContrib(s)
	delete(k.slots, iteration)
	k.trim()
	return answers
}

// answer takes a waiter out of its slot; its reply is due.
func (k *key) answer(o condition.Output, answers []answer) []answer {
	s := k.slots[o.Progress]
	if s == nil {
		return answers
	}
	for i, w := range s.waiters {
		if w.rank != o.Rank {
			continue
		}
		s.waiters = append(s.waiters[:i], s.waiters[i+1:]...)
		s.result.refs.Add(1)
		answers = append(answers, answer{w: w, iteration: o.Progress, divisor: s.divisor, res: s.result})
		s.owed--
		k.release(o.Progress, s)
		break
	}
	return answers
}

// release frees a slot that is closed and answered to everybody who will ask.
func (k *key) release(iteration uint64, s *slot) {
	if !s.closed || s.owed > 0 || s.absent.Len() > 0 {
		return
	}
	delete(k.slots, iteration)
	k.trim()
	s.result.Sent(nil)
	for i := range s.chunks {
		s.chunks[i].from.Reset()
	}
	s.started.Reset()
	*s = slot{chunks: s.chunks, waiters: s.waiters[:0], started: s.started}
	k.spare = s
}

// deliver sends replies.
func (k *key) deliver(answers []answer) {
	for _, a := range answers {
		switch {
		case a.refused != nil:
			k.t.r.fail(k.t, a.seq, a.code, a.refused.Error())
		case a.gone:
			a.w.drop(wire.ErrCancelled)
		case a.w.conn != nil:
			f := outbox.Frame{
				Header: wire.Header{
					Type: wire.TypeResult, DType: k.t.Type, Tensor: k.t.ID, Part: k.part,
					Iteration: a.iteration, Divisor: a.divisor, Codec: k.encoding(),
				},
				Payload: a.res.buf, Owner: a.res,
			}
			if k.bytes > 0 && len(a.res.buf) == 0 {
				f.Header.Flags = wire.FlagEmpty
			}
			a.w.conn.send(f)
		case a.res == nil:
			a.w.local.done(0, nil)
		default:
			err := k.fill(a.w.local.out, a.res.buf)
			a.res.Sent(nil)
			a.w.local.done(a.divisor, err)
		}
	}
}

// fill copies a result to where the worker in this process wants it.
func (k *key) fill(out, result []byte) error {
	if k.coding != nil {
		return k.coding.decode(k.t.r.s.pool, k.coding.answers, out, result)
	}
	clear(out[copy(out, result):]) // nothing stands for zeros
	return nil
}

// waitsFor lists the operations that wait for a rank here.
func (k *key) waitsFor(rank int) (seqs []uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for iteration, s := range k.slots {
		if k.machine.Missing(iteration).Has(rank) {
			seqs = append(seqs, s.seq)
		}
	}
	return seqs
}

// live tells the machine who still takes part: found out under the lock, so that of two who call because a
// rank has left neither brings an older set after the newer one.
func (k *key) live() {
	k.mu.Lock()
	live := k.t.Live()
	if live.Len() == 0 {
		k.mu.Unlock()
		return
	}
	answers := k.step(condition.Live(live), nil)
	for iteration, s := range k.slots {
		if s.closed && s.absent.Len() > 0 {
			s.absent = s.absent.Minus(s.absent.Minus(live))
			k.release(iteration, s)
		}
	}
	k.mu.Unlock()
	k.deliver(answers)
}

// cancel gives up the slots from an iteration on. Local operations end with err.
func (k *key) cancel(from uint64, err error) {
	var dropped []waiter
	k.mu.Lock()
	for i, s := range k.slots {
		if i < from {
			continue
		}
		dropped = append(dropped, s.waiters...)
		if s.closed {
			s.result.Sent(nil)
		} else {
			k.t.r.s.pool.Put(s.acc)
			k.dropContrib(s)
		}
		delete(k.slots, i)
	}
	k.trim()
	k.mu.Unlock()
	for _, w := range dropped {
		w.drop(err)
	}
}

// drop ends a local waiter with an error; remote ranks hear of it by name.
func (w waiter) drop(err error) {
	if w.local != nil {
		w.local.done(0, err)
	}
}
