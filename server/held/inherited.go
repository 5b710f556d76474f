package held

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/handover"
	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// How a value of an elastic job goes on here when its server is lost (decision 100), or it has been moved from that one (decision 113): core/handover decides. Every answer says what it covers, so that
// its rank can supply the value to an heir. Here the ranks supply theirs; what they wait for comes behind it, and waits until the newest is known.

// inherited is what a value notes for that. A nil one notes nothing.
type inherited struct {
	handed handover.Value
	covers map[int]announced // of values that are about to come, by rank
	newest []byte            // that was supplied, lent; nil for none
	summed bool              // it is in the accumulator's type
	from   int               // its rank
	under  []room.Change     // the conditions that it is used under, beside those of the declaration

	suppliers []reader            // while the value has not begun
	senders   map[int]room.Sender // by rank: where what it does with the value comes from
	failed    error               // why it does not go on

	excused []condition.Input // the pushes of ranks that do not come

	open  bool           // the value has begun, or goes on
	cover handover.Cover // what it has in it
}

// announced is what is said of a value before it comes.
type announced struct {
	cover handover.Cover
	under []room.Change
}

// waits reports whether the value has not begun here, nor goes on.
func (n *inherited) waits() bool { return n != nil && !n.open }

func (n *inherited) begun() bool { return n != nil && n.open }

// has reports whether a push is in the value.
func (n *inherited) has(r *reader) bool { return n != nil && n.cover.Has(r.rank, r.h.Seq) }

// uses notes where a rank's requests come from.
func (n *inherited) uses(r *reader) {
	if n != nil && r.to.To != nil {
		n.senders[r.rank] = r.to.To
	}
}

// came notes that a rank has come to declare the value.
func (n *inherited) came(rank int) {
	if n != nil {
		n.handed.Came(rank)
		n.cover.Declare(rank)
	}
}

// decided notes a push that is in the value, or never will be.
func (n *inherited) decided(r *reader) {
	if n != nil && r != nil && r.h.Type == wire.TypePush {
		n.cover.Push(r.rank, r.h.Seq, r.h.Iteration, r.has(wire.FlagWithin))
	}
}

// drop lets the memory of a push go that has come early.
func (r *reader) drop(pool *mempool.Pool) {
	pool.Put(r.brings)
	r.brings = nil
}

// covers notes what the value covers that a rank is about to supply.
func (v *value) covers(q *room.Request) error {
	data := make([]byte, q.Payload.Len()) // of limits.MaxRanks at most
	if err := q.Payload.Into(data); err != nil {
		return err
	}
	var c wire.Cover
	if err := c.Decode(data); err != nil {
		return err
	}
	cover := handover.Cover{Closed: c.Closed}
	for _, r := range c.Ranks {
		if !v.Members.Has(int(r.Rank)) {
			return fmt.Errorf("a value of %q has pushes of rank %d, which is not in its process set %v", v.Name, r.Rank, v.Members)
		}
		cover.Ranks = append(cover.Ranks, handover.Covered{Rank: int(r.Rank), Next: r.Next, Pushed: r.Pushed})
	}
	var under []room.Change
	for _, c := range c.Changes {
		m, err := condition.Parse(c.Model)
		if err != nil {
			return fmt.Errorf("a value of %q under a condition that is none: %w", v.Name, err)
		}
		under = append(under, room.ChangeTo(m, c.Pull, c.At))
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	n := v.state.inherited
	if n.covers == nil {
		n.covers = map[int]announced{}
	}
	n.covers[q.From()] = announced{cover, under}
	return nil
}

// supply takes the newest value that a rank has.
func (v *value) supply(q *room.Request) error {
	size := v.Bytes
	if q.Codec == wire.CodecSummed {
		size = reduce.AccBytes(v.Type, v.Bytes)
	}
	if n := q.Payload.Len(); n != size || q.DType != v.Type || q.Codec == wire.CodecDeclared {
		return fmt.Errorf("%d bytes of %v in encoding %d are no value of partition %d of %q, want %d of %v", n, q.DType, q.Codec, v.Number, v.Name, size, v.Type)
	}
	b, err := q.Payload.Lend(v.Round.Pool)
	v.mu.Lock()
	away, replies := v.elsewhere()
	if err == nil && !away && !v.state.over {
		err = v.state.makeRoom()
	}
	switch {
	case errors.As(err, new(room.MemoryError)) && !away:
		v.Round.Pool.Put(b)
		replies, err = v.state.giveUp(err), nil
	case away:
		v.Round.Pool.Put(b)
		replies, err = append(replies, reply{reader: reader{rank: q.From(), to: q.Reply, h: q.Header}, kind: moves}), nil
	case err == nil:
		replies, err = v.state.supply(q, b)
	}
	v.mu.Unlock()
	v.deliver(replies)
	return err
}

// giveUp refuses the value from now on to all who use it.
func (s *readers) giveUp(err error) (replies []reply) {
	s.inherited.failed = fmt.Errorf("partition %d of the held value %q does not go on after the loss of its server: %w", s.Number, s.Name, err)
	for _, r := range s.remove(func(*reader) bool { return true }) {
		r.drop(s.Round.Pool)
		replies = append(replies, reply{reader: r, err: s.inherited.failed})
	}
	return replies
}

// supply takes the newest value that a rank has, and the memory.
func (s *readers) supply(q *room.Request, value []byte) ([]reply, error) {
	n, rank := s.inherited, q.From()
	a, known := n.covers[rank]
	delete(n.covers, rank)
	switch {
	case !known:
		s.Round.Pool.Put(value)
		return nil, fmt.Errorf("rank %d supplies partition %d of %q without saying what it covers", rank, s.Number, s.Name)
	case s.over || n.open || !n.handed.Supplied(rank, a.cover):
		s.Round.Pool.Put(value)
	default:
		s.Round.Pool.Put(n.newest)
		n.newest, n.summed, n.from, n.under = value, q.Codec == wire.CodecSummed, rank, a.under
	}
	r := reader{rank: rank, to: q.Reply, h: q.Header}
	n.uses(&r)
	s.before = max(s.before, uint64(q.Before))
	if s.over || n.open {
		return nil, nil
	}
	n.suppliers = append(n.suppliers, r)
	return s.open(nil), nil
}

// comeEarly has a rank wait with what it brings. It has one use of a value under way.
func (s *readers) comeEarly(r *reader, b []byte) []reply {
	for i := range s.waiting {
		if s.waiting[i].rank == r.rank {
			return []reply{{reader: *r, err: fmt.Errorf("rank %d uses %q twice at a time, before it goes on after the loss of its server", r.rank, s.Name)}}
		}
	}
	if failed := s.inherited.failed; failed != nil {
		return []reply{{reader: *r, err: failed}}
	}
	early := *r
	early.early = true
	if len(b) > 0 {
		var err error
		if early.brings, err = s.Round.Pool.Get(len(b)); err != nil {
			return []reply{{reader: *r, err: room.MemoryError{Err: err}}}
		}
		copy(early.brings, b)
	}
	if err := s.wait(&early); err != nil {
		early.drop(s.Round.Pool)
		return []reply{{reader: *r, err: err}}
	}
	return s.begin(nil)
}

// begin has the value begin with the root's, or go on from the newest that was supplied, when all have come that it waits for.
func (s *readers) begin(replies []reply) []reply {
	n := s.inherited
	newest, supplied := n.handed.Newest()
	switch {
	case n.failed != nil || supplied && n.handed.Missing(s.Lost()).Len() > 0:
		return replies
	case supplied:
		if err := s.resume(newest); err != nil {
			return append(replies, s.giveUp(err)...)
		}
		replies = append(s.changeAgain(replies), reply{kind: comes, pull: s.pulls()})
	case !s.known || !s.declared.Covers(s.machine.Live()):
		return replies
	}
	n.open, n.suppliers = true, nil
	for _, push := range n.excused {
		replies, _ = s.step(push, nil, nil, replies)
	}
	n.excused = nil
	replies = s.open(replies)
	live := s.machine.Live()
	for _, r := range s.remove(func(r *reader) bool { return r.early }) {
		b := r.brings
		r.early, r.brings = false, nil
		switch {
		case !live.Has(r.rank): // nobody waits for the answer
		case r.h.Type == wire.TypePush:
			more, _ := s.push(&r, b)
			replies = append(replies, more...)
		default:
			replies = append(replies, s.pull(&r)...)
		}
		s.Round.Pool.Put(b)
	}
	return replies
}

// resume goes on from the newest value that was supplied.
func (s *readers) resume(newest handover.Cover) error {
	n := s.inherited
	m, err := newest.Resume(s.Conditions())
	if err != nil {
		return err
	}
	s.machine = m
	again := m.Tally() // of pushes that were counted where they came
	s.past.Admitted -= again.Admitted
	s.past.Dropped -= again.Dropped
	n.cover = newest
	for _, r := range newest.Ranks {
		s.declared.Add(r.Rank)
	}
	for _, rank := range s.declared.Ranks() {
		n.cover.Declare(rank)
	}
	if n.summed {
		copy(s.acc, n.newest)
		s.outdate()
	} else {
		clear(s.acc)
		s.sum(n.newest, 1/(s.unit()*s.Postscale))
	}
	s.known = true
	s.Round.Pool.Put(n.newest)
	n.newest = nil
	s.Round.Log.Info("a held value goes on here", zap.String("tensor", s.Name), zap.Uint32("partition", s.Number),
		zap.Int("from the value of rank", n.from), zap.Uint64("iteration", m.V()))
	return nil
}

// changeAgain makes the changes of conditions that come with the value, and then those that have been made here meanwhile.
func (s *readers) changeAgain(replies []reply) []reply {
	here := s.changed
	s.changed, s.changes = nil, room.Changes{}
	for _, c := range slices.Concat(s.inherited.under, here) {
		replies = append(replies, s.change(c)...)
	}
	return replies
}

// release lets the memory go of a value that was given up.
func (s *readers) release() {
	if n := s.inherited; n != nil {
		s.Round.Pool.Put(n.newest)
		n.newest = nil
	}
}

// covering says what the value has in it; nil where nobody asks.
func (s *readers) covering() []byte {
	n := s.inherited
	if n == nil {
		return nil
	}
	c := wire.Cover{Closed: s.machine.V()}
	for _, r := range n.cover.Ranks {
		c.Ranks = append(c.Ranks, wire.CoveredPushes{Rank: uint16(r.Rank), Next: r.Next, Pushed: r.Pushed})
	}
	for _, changed := range s.changed {
		m := cmp.Or(changed.Pull, changed.Push)
		c.Changes = append(c.Changes, wire.ChangedCondition{At: changed.At, Pull: changed.Pull != nil, Model: m.Name})
	}
	return c.Append(nil)
}

// coverHeader is that of the frame before an answer.
func (v *value) coverHeader(r *reply) wire.Header {
	h := v.header(r)
	return wire.Header{Type: wire.TypeCover, Tensor: h.Tensor, Part: h.Part, Iteration: h.Iteration, Seq: h.Seq}
}
