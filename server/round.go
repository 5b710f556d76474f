package server

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/held"
	"github.com/paceline/paceline/server/messages"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/server/transfer"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// round is everything a server holds between one init and shutdown of all workers.
type round struct {
	s       *Server
	members *membership.View

	mu       lockorder.RWMutex
	tensors  map[uint32]*tensor
	conns    map[int][]*conn // by rank
	local    *Local          // of the worker in this process, if any
	byes     map[int]int     // connections of a rank on which it said goodbye
	joins    map[int]int     // connections of a rank on which it said that it joins
	joining  hostJoin        // of a server that sums for its host
	lost     *wire.Lost
	ended    bool
	removals removals
	farewell bool // it is empty and has said goodbye, to be read by workers that go on without it

	deserted chan struct{} // closed by desert when every rank has left, or one is lost
	desert   func()

	names names

	settings room.Round
	transfer *transfer.Room
	messages *messages.Room

	tuners *held.Tuners
	cork   cork
	door   door
}

func newRound(s *Server, first *membership.Epoch) *round {
	own := *first
	own.Keys = membership.Keys{} // the engine's in this process, which changes them; a server knows what is declared to it
	r := &round{
		s: s, members: membership.NewView(&own),
		tuners: held.NewTuners(), tensors: map[uint32]*tensor{}, removals: newRemovals(), conns: map[int][]*conn{}, byes: map[int]int{}, joins: map[int]int{}, deserted: make(chan struct{}),
	}
	r.desert = sync.OnceFunc(func() { close(r.deserted) })
	r.settings = room.Round{
		Pool: s.pool, Log: s.cfg.Log, RankOrder: s.cfg.RankOrder, Seed: s.cfg.Seed, Model: s.cfg.Model,
		Elastic: first.Elastic, StallWarning: s.cfg.StallWarning, StallShutdown: s.cfg.StallShutdown, Membership: r.members, Here: first.Here,
	}
	r.settings.Hosts.Sums = first.HostSums()
	if here := s.cfg.Host; here != nil {
		r.settings.Hosts.Here, r.settings.Hosts.Uplink, r.settings.Hosts.Kick = rankset.Of(r.settings.Hosts.Sums.Of(here.Rank)...), here.Uplink, r.kickUplink
	}
	r.mu.Place(room.LevelRound, "round.mu")
	r.cork.mu.Place(room.LevelConn, "cork.mu")
	r.transfer = transfer.New(&r.settings)
	r.messages = messages.New(&r.settings)
	r.names.begin(r)
	return r
}

// all is the ranks of the round that were not lost; of a server that sums for its host, those there.
func (r *round) all() rankset.Set {
	if r.settings.Hosts.Uplink != nil {
		return r.settings.Hosts.Here
	}
	return r.members.Now().Live()
}

// kickUplink has sums that were handed on leave, with the release of the cork if somebody holds it.
func (r *round) kickUplink() {
	if !r.cork.keepsUplink(r.settings.Hosts.Uplink) {
		r.settings.Hosts.Uplink.Kick()
	}
}

// announce accepts a tensor that a rank is about to use.
func (r *round) announce(t *wire.Tensor) error {
	if err := t.Check(); err != nil {
		return err
	}
	cost := costOf(t)
	if err := r.s.pool.Charge(cost); err != nil {
		return fmt.Errorf("tensor %q: %w", t.Name, room.MemoryError{Err: err})
	}
	kept := false
	defer func() {
		if !kept {
			r.s.pool.Refund(cost)
		}
	}()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.removals.has(t) {
		return nil
	}
	if have, ok := r.tensors[t.ID]; ok {
		if have.Name != t.Name || have.ProcessSet != t.ProcessSet || have.signature != t.Signature() {
			return fmt.Errorf("tensor %d is %q %s, not %q %s", t.ID, have.Name, have.signature, t.Name, t.Signature())
		}
		return r.agrees(&have.Tensor.Tensor, t)
	}
	if len(r.tensors) >= limits.MaxTensors {
		return fmt.Errorf("tensor %q: %d tensors are declared, limit %d", t.Name, len(r.tensors), limits.MaxTensors)
	}
	n, err := newTensor(r, t)
	if err == nil {
		r.tensors[t.ID], kept = n, true
	}
	return err
}

// agrees checks what a rank says of a tensor's partitions against what another has said. It has that from the scheduler, which numbers tensors by their partitions and process
// sets; where those lie it says where its host sums first.
func (r *round) agrees(have, t *wire.Tensor) error {
	switch {
	case !slices.Equal(have.Ranks, t.Ranks):
		return fmt.Errorf("tensor %d, %q, is of ranks %v, not %v", t.ID, t.Name, have.Ranks, t.Ranks)
	case !slices.Equal(have.Parts, t.Parts):
		return fmt.Errorf("tensor %d, %q, is cut into %d partitions, not these %d", t.ID, t.Name, len(have.Parts), len(t.Parts))
	case r.settings.Hosts.Uplink != nil && !slices.Equal(have.Servers, t.Servers):
		return fmt.Errorf("tensor %d, %q, has its partitions on other servers", t.ID, t.Name)
	}
	return nil
}

// costOf is what the memory limit is charged with for a tensor that is announced, in bytes.
func costOf(t *wire.Tensor) int {
	return room.WaitingBytes + len(t.Name) + len(t.Sync.Model) + len(t.Codec) + 8*(len(t.Shape)+len(t.Ranks)+2*len(t.Parts))
}

// inUse are the announced tensors, for who must not hold mu while looking at them.
func (r *round) inUse() []*tensor {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.AppendSeq(make([]*tensor, 0, len(r.tensors)), maps.Values(r.tensors))
}

// tensor finds an announced tensor and checks what a frame says of it.
func (r *round) tensor(h *wire.Header) (*tensor, error) {
	r.mu.RLock()
	t := r.tensors[h.Tensor]
	_, removed := r.removals.tensors[h.Tensor]
	r.mu.RUnlock()
	if removed {
		return nil, errRemoved
	}
	if t == nil {
		return nil, fmt.Errorf("%v of tensor %d, which was not announced", h.Type, h.Tensor)
	}
	if !t.Members.Has(int(h.Rank)) {
		return nil, fmt.Errorf("%v of %q from rank %d, which is not in its process set %v", h.Type, t.Name, h.Rank, t.Members)
	}
	return t, nil
}

// serve brings a request to its room. An error is of a peer that does not keep to the protocol.
func (r *round) serve(q *room.Request) error {
	r.s.served.Add(uint64(q.Payload.Len()))
	if q.Type == wire.TypeWithdraw { // the other end hears of it here, whether the door is shut or not
		return r.messages.Serve(q)
	}
	if q.Type.OfMessage() || q.Type == wire.TypePiece || q.Type == wire.TypeMatch {
		return r.door.pass(q, func() error { return r.messages.Serve(q) })
	}
	t, err := r.tensor(&q.Header)
	if errors.Is(err, errRemoved) {
		q.Reply.Fail(inprocess.ErrCancelled)
		return nil
	}
	if err != nil {
		return err
	}
	if q.Type == wire.TypePut || q.Type == wire.TypeGet || t.held != nil {
		return r.door.pass(q, func() error { return r.dispatch(t, q) })
	}
	return r.dispatch(t, q)
}

// dispatch brings a request about a tensor to its room.
func (r *round) dispatch(t *tensor, q *room.Request) error {
	switch q.Type {
	case wire.TypePush, wire.TypePull, wire.TypeSupply, wire.TypeRestore, wire.TypeResidual:
		if t.Elsewhere(q.Part) {
			return t.keys.SendAway(q) // the caller discards the payload
		}
	}
	switch q.Type {
	case wire.TypePush, wire.TypePull, wire.TypePut, wire.TypeGet:
		if !t.enter(&q.Header) {
			q.Reply.Fail(inprocess.ErrCancelled)
			return nil
		}
	case wire.TypeUse:
		t.enter(&q.Header)
		return nil
	case wire.TypeSupply:
		t.over(&q.Header)
	}
	if t.held != nil && q.Has(wire.FlagInPlace) {
		return fmt.Errorf("%v of %q, a value that the servers hold, does not travel in place", q.Type, t.Name)
	}
	if t.Authenticated && !q.Has(wire.FlagAuthenticated) && (q.Type == wire.TypePush || q.Type == wire.TypePut || q.Type == wire.TypeSupply || q.Type == wire.TypeResidual) {
		return fmt.Errorf("%v of %q, which is declared as authenticated, without authentication tags", q.Type, t.Name)
	}
	if q.Type == wire.TypePut || q.Type == wire.TypeGet {
		return r.transfer.Serve(t.Tensor, q)
	}
	q.Reply.Priority = t.Priority
	return t.keys.Serve(q)
}

// report brings a rank's end of an iteration to the values that it is of.
func (r *round) report(h *wire.Header, iteration wire.Report) error {
	t, err := r.tensor(h)
	if errors.Is(err, errRemoved) {
		return nil
	}
	if err != nil {
		return err
	}
	if t.held == nil {
		return fmt.Errorf("%v of %q, which is summed", h.Type, t.Name)
	}
	return t.held.Report(h, iteration)
}

// lose notes that a rank is gone without a goodbye: all others are told. (Of an elastic job's rank only the scheduler is, which
// begins the next epoch without it.) The scheduler hears of which round: its next one
// may have begun when the report arrives.
func (r *round) lose(l wire.Lost) {
	l.Round = r.members.Now().Round
	r.mu.Lock()
	if r.ended || r.lost != nil || l.Role == wire.RoleWorker && r.leftRanks().Has(l.Rank) {
		r.mu.Unlock()
		return
	}
	ends := !r.settings.Elastic || l.Role != wire.RoleWorker
	if ends {
		r.lost = &l
	}
	r.mu.Unlock()
	r.s.cfg.Log.Debug("peer lost", zap.String("role", string(l.Role)), zap.Int("rank", l.Rank), zap.String("why", l.Why))
	if ends {
		r.desert()
		r.notify(r.all(), func(c *conn) { c.sendJSON(wire.Header{Type: wire.TypeLost}, l) }, func(n Notices) { n.Lost(l) })
	}
	if r.s.cfg.OnLost != nil {
		r.s.cfg.OnLost(l)
	}
}

// notify sends a notice to ranks: on one connection to each that is there, and to the worker in this process where it is
// one of them.
func (r *round) notify(ranks rankset.Set, send func(*conn), local func(Notices)) {
	var conns []*conn
	r.mu.RLock()
	for rank, cs := range r.conns {
		if ranks.Has(rank) && len(cs) > 0 {
			conns = append(conns, cs[0])
		}
	}
	here := r.local
	r.mu.RUnlock()
	for _, c := range conns {
		send(c)
	}
	if here != nil && ranks.Has(here.rank) {
		local(here.notices)
	}
}

// end closes the round's connections and lets its memory go.
func (r *round) end() {
	r.mu.Lock()
	r.ended = true
	lost := r.lost
	conns := slices.Concat(slices.Collect(maps.Values(r.conns))...)
	r.mu.Unlock()
	for _, c := range conns {
		if lost != nil { // on each, or a rank may read the goodbye on one before the reason on another
			c.sendJSON(wire.Header{Type: wire.TypeLost}, lost)
		}
		c.goodbye()
	}
	force := time.AfterFunc(outbox.LastWords, func() { // for a worker that reads nothing
		for _, c := range conns {
			_ = c.tc.Close()
		}
	})
	defer force.Stop()
	for _, c := range conns {
		<-c.done
	}
	r.dropTensors(errRoundOver)
	r.messages.End(errRoundOver)
	r.names.reset()
}

// dropTensors forgets every tensor; local operations in flight end with err.
func (r *round) dropTensors(err error) {
	r.mu.Lock()
	tensors := r.tensors
	r.tensors = map[uint32]*tensor{}
	clear(r.removals.tensors)
	r.mu.Unlock()
	r.tuners.Reset()
	for _, t := range tensors {
		t.cancel(0, err)
		r.s.pool.Refund(costOf(&t.Tensor.Tensor))
	}
	r.transfer.End(err)
}
