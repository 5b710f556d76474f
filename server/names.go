package server

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// names is what ranks say of the names whose home is here, behind one lock that is held for no longer than
// core/agreement decides. What it decides is carried out afterwards.
type names struct {
	began time.Time
	pool  *mempool.Pool

	mu   lockorder.Mutex
	home *agreement.Home

	charged int // operations in the home's windows that the memory limit is charged with
	noted   int // bytes that it is charged with for failures of tensors that nobody need have announced

	joined, left atomic.Pointer[rankset.Set] // the home's, for readers without mu
}

func (n *names) begin(r *round) {
	n.mu.Place(room.LevelNames, "names")
	n.began, n.pool = time.Now(), r.settings.Pool
	n.home = agreement.NewHome(agreement.Config{All: r.all(), StallWarning: r.settings.StallWarning, StallShutdown: r.settings.StallShutdown, Elastic: r.settings.Elastic})
	n.step(func(*agreement.Home) {})
}

// step has the home decide something, which may change who takes part.
func (n *names) step(decide func(*agreement.Home)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	decide(n.home)
	n.settle()
	joined, left := n.home.Joined(), n.home.Left()
	n.joined.Store(&joined)
	n.left.Store(&left)
}

// settle has the memory limit be charged with what is in the windows now.
func (n *names) settle() {
	n.pool.Refund((n.charged - n.home.Waiting()) * room.WaitingBytes)
	n.charged = n.home.Waiting()
}

// reset forgets all names.
func (n *names) reset() {
	n.step(func(h *agreement.Home) {
		h.Reset()
		n.pool.Refund(n.noted)
		n.noted = 0
	})
}

// joinedRanks are the ranks that have joined, leftRanks those that have said goodbye, or that an elastic job has lost. The sets are shared: do not
// change them.
func (r *round) joinedRanks() rankset.Set { return *r.names.joined.Load() }

func (r *round) leftRanks() rankset.Set { return *r.names.left.Load() }

// agreed is what ranks can differ about of a tensor.
func agreed(t *tensor) *agreement.Tensor {
	a := &agreement.Tensor{
		ID: agreement.ID{Set: t.ProcessSet, Name: t.Name}, Generation: t.Generation, Signature: t.signature,
		Kind: t.Kind, Root: t.Root, Ranks: t.Members, Coded: t.Codec != "",
	}
	if quorum, known := t.Model.Quorum(len(t.Ranks)); known {
		a.Enough = quorum
	}
	return a
}

// arrive notes that a rank has started an operation, and reports whether it may go on.
func (r *round) arrive(t *tensor, h *wire.Header) bool {
	n := &r.names
	now := time.Since(n.began)
	if err := n.pool.Charge(room.WaitingBytes); err != nil {
		t.Fail(h.Seq, units.FailMemory, room.MemoryError{Err: err}.Error())
		return false
	}
	n.mu.Lock()
	n.charged++
	proceed, failed := n.home.Arrive(t.agreed, int(h.Rank), h.Seq, now)
	n.settle()
	n.mu.Unlock()
	r.tell(failed)
	return proceed
}

// cancel notes that a rank gave up a tensor from an iteration on.
func (r *round) cancel(h *wire.Header) {
	r.mu.RLock()
	t := r.tensors[h.Tensor]
	r.mu.RUnlock()
	if t == nil {
		return
	}
	why := agreement.Heard
	switch {
	case h.Flags&wire.FlagOwnWill != 0:
		why = agreement.OwnWill
	case h.Flags&wire.FlagDeclare != 0 && !t.Held():
		why = agreement.Anew
	}
	var alone bool
	var failed []agreement.Failure
	r.names.step(func(home *agreement.Home) { alone, failed = home.Cancel(t.agreed, int(h.Rank), h.Seq, why) })
	r.tell(failed)
	if alone {
		t.held.Forget(int(h.Rank), h.Seq, h.Flags&(wire.FlagDeclare|wire.FlagOwnWill) == wire.FlagDeclare)
		return
	}
	r.drop(t, h.Iteration)
}

// undeclared notes that a rank gives up an operation whose tensor it has not declared. It does not know the name's home and tells every
// server, each of which tells all ranks, or those that come later. An operation that is late is told to its home alone. An error is of a peer that does not keep to the protocol, or of memory.
func (r *round) undeclared(rank int, f *wire.Failure) error {
	if err := f.Check(); err != nil {
		return err
	}
	if !slices.Contains(f.Ranks, rank) {
		return fmt.Errorf("failure of %q from rank %d, which is not in its process set %v", f.Name, rank, f.Ranks)
	}
	n := &r.names
	cost := room.WaitingBytes + len(f.Name) + len(f.Text) + 8*len(f.Ranks)
	if err := n.pool.Charge(cost); err != nil {
		return fmt.Errorf("failure of %q: %w", f.Name, room.MemoryError{Err: err})
	}
	t := &agreement.Tensor{ID: agreement.ID{Set: f.ProcessSet, Name: f.Name}, Generation: f.Generation, Ranks: rankset.Of(f.Ranks...)}
	var failed []agreement.Failure
	n.step(func(home *agreement.Home) {
		n.noted += cost
		if f.Late {
			failed = home.Expired(t, rank, f.Seq, f.Text)
		} else {
			failed = home.Undeclared(t, f.Seq, f.Code, f.Text)
		}
	})
	r.tell(failed)
	return nil
}

// drop lets go of everything held for a tensor from an iteration on.
func (r *round) drop(t *tensor, iteration uint64) {
	t.cancel(iteration, inprocess.ErrCancelled)
	r.transfer.Cancel(t.ID, iteration, inprocess.ErrCancelled)
}

// tell sends failures to the ranks that they concern. Those of an operation answer with a cancel.
func (r *round) tell(failed []agreement.Failure) {
	for _, f := range failed {
		notice := wire.Failure{Code: f.Code, Seq: f.Count, Text: f.Text}
		if t := f.Tensor; t != nil {
			notice.Name, notice.ProcessSet, notice.Generation = t.Name, t.Set, t.Generation
		}
		r.s.cfg.Log.Debug("operation failed", zap.String("tensor", notice.Name), zap.String("why", notice.Text))
		r.notify(f.Ranks, func(c *conn) { c.sendJSON(wire.Header{Type: wire.TypeFail}, notice) }, func(n Notices) { n.Failed(notice) })
	}
}

// checkStalls warns of operations that wait for ranks, and ends those that wait too long.
func (r *round) checkStalls(now time.Time) {
	n := &r.names
	n.mu.Lock()
	slow, failed := n.home.Tick(now.Sub(n.began))
	n.settle()
	n.mu.Unlock()
	r.tell(failed)
	for _, t := range r.inUse() {
		if t.held != nil {
			t.held.CheckStalls(now)
		}
	}
	for _, s := range slow {
		r.warn(s)
	}
}

// warn tells the ranks that a warning is for.
func (r *round) warn(s agreement.Stall) {
	stall := wire.Stall{Name: s.Name, Waiting: s.Ranks.Ranks(), Missing: s.Missing.Ranks(), Seconds: s.Waited.Seconds()}
	r.notify(s.Ranks, func(c *conn) { c.sendJSON(wire.Header{Type: wire.TypeStall}, stall) }, func(n Notices) { n.Stalled(stall) })
}
