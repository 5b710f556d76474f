package worker

import (
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// book is what a rank knows of its tensors and has in flight: names with their counts and declarations, states that
// wait for their tensors, supersteps, a join, and why the engine accepts no more operations. It has no lock: the engine
// keeps it behind its own. What it decides is done by the engine, when the lock is released.
type book struct {
	cfg        *Config
	names      map[nameID]*nameState
	inflight   map[*operation]struct{}
	lent       int                       // how many look at operations without the lock: none is used again meanwhile
	seen       map[nameID]struct{}       // empty, for admit
	released   []*operation              // that were held, to be started
	releasing  bool                      // somebody starts them
	undeclared []*declaration            // to be declared with the next request
	unclaimed  map[stateID]*saved        // what was set before its tensors are declared
	policies   map[string]*policy.Policy // that operations have named, by their text
	removed    map[uint32]struct{}       // process sets; their numbers are not used again
	joining    *joinState
	messages   messages
	leaders    map[uint32]*declaration // first values of groups with supersteps, by tensor
	dueOf      map[string]*lateRanks   // by the numbers of the ranks: of whom a warning is due
	said       map[string]time.Time    // when such a warning was last shown
	warned     map[string]time.Time    // when a server or this rank last knew of a stall
	over       over                    // operations that have ended
	suspension *wire.Suspension        // nil before an exchange had to begin again
	kept       kept                    // has a lock of its own
	host       []int                   // the ranks of this host, where they sum among themselves first; else nil
	climbs     map[*operation]struct{} // sums of this host under way
	tuner      *tuner                  // nil for none
	broken     error                   // why the engine accepts no more operations
	lost       *wire.Lost
}

func newBook(cfg *Config) book {
	return book{
		cfg: cfg, names: map[nameID]*nameState{}, inflight: map[*operation]struct{}{}, seen: map[nameID]struct{}{}, leaders: map[uint32]*declaration{},
		said: map[string]time.Time{}, dueOf: map[string]*lateRanks{}, warned: map[string]time.Time{}, policies: map[string]*policy.Policy{}, removed: map[uint32]struct{}{}, tuner: newTuner(cfg),
		host: cfg.Membership.Now().HostSums().Of(cfg.Rank), climbs: map[*operation]struct{}{},
	}
}

// epoch is the current membership.
func (b *book) epoch() *membership.Epoch { return b.cfg.Membership.Now() }

// admit checks what depends on the other operations in flight.
func (b *book) admit(ops []Op) error {
	if b.broken != nil {
		return fmt.Errorf("%s on rank %d: %w", ops[0].what(), b.cfg.Rank, b.broken)
	}
	if b.joining != nil && slices.ContainsFunc(ops, func(o Op) bool { return !o.Kind.Message() }) {
		return fmt.Errorf("%w: this rank has joined and waits for the others", ErrInvalid)
	}
	if len(b.inflight)+len(ops) > limits.MaxHandles {
		return fmt.Errorf("%w: %d operations in flight, limit %d; synchronise some first", ErrMemory, len(b.inflight), limits.MaxHandles)
	}
	defer clear(b.seen)
	for i := range ops {
		if _, removed := b.removed[ops[i].Set.ID]; removed {
			return fmt.Errorf("%w: %q on rank %d: process set %d was removed", ErrInvalid, ops[i].name(), b.cfg.Rank, ops[i].Set.ID)
		}
		if ops[i].Kind.Message() {
			continue
		}
		if err := b.checkCodec(&ops[i]); err != nil {
			return err
		}
		if err := b.checkValue(&ops[i]); err != nil {
			return err
		}
		if err := b.checkSync(&ops[i]); err != nil {
			return err
		}
		if ops[i].Name == "" {
			continue
		}
		id := nameID{ops[i].Set.ID, ops[i].Name}
		_, twice := b.seen[id]
		if n := b.names[id]; twice || n != nil && n.InFlight() > 0 {
			return fmt.Errorf("%w: %q on rank %d; synchronise it first, or give the tensors different names", ErrDuplicate, ops[i].Name, b.cfg.Rank)
		}
		b.seen[id] = struct{}{}
	}
	return nil
}

// checkValue finds uses of a held value that come before its declaration, or after it once more.
func (b *book) checkValue(op *Op) error {
	if op.Kind != units.Accumulate {
		return nil
	}
	if op.Postscale == 0 && b.epoch().Elastic {
		return fmt.Errorf("%w: %q on rank %d has a postscale of 0: nothing is read of such a value, which in an elastic job goes on from what ranks have read", ErrInvalid, op.Name, b.cfg.Rank)
	}
	known := b.declares(op)
	if !known && op.Use != units.Declare {
		return fmt.Errorf("%w: %q has no value with these properties on rank %d: declare it first, on every rank (again after a join, or after it failed)", ErrInvalid, op.Name, b.cfg.Rank)
	}
	if known && op.Use == units.Declare {
		return fmt.Errorf("%w: %q has a value already on rank %d", ErrInvalid, op.Name, b.cfg.Rank)
	}
	return nil
}

// checkSync refuses a synchronisation model that the ranks cannot run. A tensor's first use alone is checked, since a
// model may be an expression, which is slow to compile.
func (b *book) checkSync(op *Op) error {
	if op.Sync == (options.Sync{}) || b.declares(op) {
		return nil
	}
	flow := condition.Aggregate
	if op.Kind == units.Accumulate {
		flow = condition.Accumulate
	}
	if err := condition.CheckSetting(op.Sync.Model, op.Sync.SoftPark, flow, len(op.Set.Ranks)); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return nil
}

// declares reports whether the operation's signature has a declaration.
func (b *book) declares(op *Op) bool {
	n := b.names[nameID{op.Set.ID, op.name()}]
	return n != nil && b.find(n, op, 0) != nil
}
