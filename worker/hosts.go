package worker

import (
	"errors"
	"slices"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Where a host has several workers and no server of the job, a sum's partition goes to the process of one of these, the
// representative, whose server adds up what the host's ranks push and hands that to the engine here. The engine
// pushes it to the partition's server, and each byte crosses the host's link once in each direction. The home server hears
// from every rank that it uses the name.

// hostServer is the way's index to the server in the process of another rank of this host.
func (e *Engine) hostServer(rank int) int {
	return len(e.epoch().Servers) + slices.Index(e.host, rank)
}

// servers are all that this worker reaches: those of the job, and those that sum for this host.
func (e *Engine) servers() []membership.Server {
	epoch := e.epoch()
	all := slices.Clone(epoch.Servers)
	for _, rank := range e.host {
		all = append(all, membership.Server{Node: epoch.Workers[rank].Node, Rank: rank})
	}
	return all
}

// ofHost reports whether a way leads to a server that sums for this host.
func (e *Engine) ofHost(index int) bool { return index >= len(e.epoch().Servers) }

// sumOnHost finds the ranks among which a declaration is summed first.
func (b *book) sumOnHost(d *declaration) {
	if len(b.host) == 0 || !d.t.SumsOnHosts() {
		return
	}
	for _, rank := range b.host {
		if slices.Contains(d.t.Ranks, rank) {
			d.host = append(d.host, rank)
		}
	}
	if len(d.host) < 2 {
		d.host = nil
	}
}

// onHost has partitions go to the representatives, and adds a task that tells the home server of the use.
func (o *operation) onHost() {
	last := len(o.d.t.Parts)
	for i := range o.room[:last] {
		o.room[i].server = o.e.hostServer(membership.Representative(o.d.host, o.d.t.ID, uint32(i)))
	}
	use := &o.room[last]
	*use = task{o: o, h: o.header(wire.TypeUse, 0, o.DType), server: o.d.placed.Servers[0]}
	use.h.Flags = wire.FlagHome
	o.list[last] = use
}

// patience is how long an operation waits for servers: behind the representative's own wait, which names the right one.
func (o *operation) patience() agreement.Patience {
	p := o.e.cfg.Patience
	if o.d != nil && o.d.host != nil {
		p.Margin *= 2
	}
	return p
}

// climb is a sum of this host on its way to its server. It is no operation of this rank.
type climb struct {
	operation
	only   task
	tasks  [1]*task
	answer wire.Header
	back   func(wire.Header, error)
}

// Uplink is the engine as the server in this process uses it, which sums for this host.
type Uplink struct{ e *Engine }

// NewUplink makes one that is attached to its engine later.
func NewUplink() *Uplink { return new(Uplink) }

// Attach gives it the engine, before that submits anything: until then no sum is complete.
func (u *Uplink) Attach(e *Engine) { u.e = e }

// Kick has what was pushed leave.
func (u *Uplink) Kick() {
	for i := range u.e.epoch().Servers {
		u.e.ways[i].kick(false)
	}
}

// Open gives what pushes sums of a tensor.
func (u *Uplink) Open(t *wire.Tensor) func(wire.Header, []byte, func(wire.Header, error)) (abandon func()) {
	d := &declaration{t: *t, placed: &membership.Tensor{Servers: t.Servers}}
	return func(h wire.Header, sum []byte, done func(wire.Header, error)) func() {
		return u.e.climb(d, h, sum, done)
	}
}

// climb pushes a sum of this host, in memory that the answer replaces.
func (e *Engine) climb(d *declaration, h wire.Header, sum []byte, done func(wire.Header, error)) (abandon func()) {
	c := &climb{back: done}
	o := &c.operation
	o.mu.Place(levelWorker, "operation")
	o.e, o.d, o.beside, o.climb, o.seq, o.iteration = e, d, true, c, h.Seq, h.Iteration
	o.Op = Op{Kind: d.t.Kind, DType: d.t.DType, ReduceOp: d.t.Op, Name: d.t.Name, Set: wire.ProcessSet{ID: d.t.ProcessSet, Ranks: d.t.Ranks}, Declared: d.t.Declared}
	t := &c.only
	*t = task{o: o, h: h, server: d.placed.Servers[h.Part], out: sum, answer: true}
	if t.in = sum; h.Flags&wire.FlagEmpty != 0 {
		t.in = nil
	}
	t.h.Rank = uint16(e.cfg.Rank)
	e.mu.Lock()
	err := e.broken
	t.h.Epoch, o.epoch = e.epoch().Joins, e.epoch().Joins
	o.Priority = e.priorityOf(d)
	if err == nil {
		e.climbs[o] = struct{}{}
	}
	e.mu.Unlock()
	if err != nil {
		done(wire.Header{}, inprocess.ErrCancelled)
		return func() {}
	}
	t.start()
	o.mu.Lock()
	failed := o.err != nil // the engine has ended since
	o.pending.Store(1)
	if !failed {
		c.tasks[0] = t
		o.tasks = c.tasks[:]
		o.pending.Store(2)
	}
	o.mu.Unlock()
	if !failed {
		t.way().push(t)
	}
	o.complete()
	return c.abandon
}

// priorityOf is the priority with which this rank has used a tensor last.
func (b *book) priorityOf(d *declaration) int {
	if n := b.names[nameID{d.t.ProcessSet, d.t.Name}]; n != nil {
		for _, own := range n.decls {
			if own.t.ID == d.t.ID {
				return own.priority
			}
		}
	}
	return 0
}

func (c *climb) abandon() { c.operation.fail(inprocess.ErrCancelled) }

// finish hands the answer to the server in this process.
func (c *climb) finish() {
	o := &c.operation
	o.mu.Lock()
	err := o.err
	o.tasks, o.abandoned = nil, true
	o.mu.Unlock()
	o.e.mu.Lock()
	delete(o.e.climbs, o)
	broken := o.e.broken
	o.e.mu.Unlock()
	switch {
	case err == nil || errors.Is(err, inprocess.ErrCancelled):
	case broken != nil:
		err = inprocess.ErrCancelled // why the engine ends says more
	default:
		err = inprocess.Failure{Code: codeOf(err), Text: err.Error()}
	}
	c.back(c.answer, err)
}

// codeOf is failureKind's inverse.
func codeOf(err error) units.FailureCode {
	switch {
	case errors.Is(err, ErrStall):
		return units.FailStall
	case errors.Is(err, ErrMemory):
		return units.FailMemory
	case errors.Is(err, ErrMismatch):
		return units.FailMismatch
	}
	return units.FailUnsupported
}

// HostNotices is the engine as the server in this process tells it of what happens, which sums for this host.
type HostNotices struct{ *Engine }

// Joined is the word that all ranks of this host have joined.
func (n HostNotices) Joined(last int) { n.joined(n.hostServer(n.cfg.Rank), last) }

// Failed ends an operation that this host cannot do. The servers tell the ranks of others.
func (n HostNotices) Failed(f wire.Failure) { n.failedHere(f) }

func (e *Engine) failedHere(f wire.Failure) {
	err := error(because{failureKind(f.Code), f.Text})
	if f.Name == "" {
		e.failJoin(err)
		return
	}
	e.mu.Lock()
	v := e.nameFailed(f, err)
	e.lent++
	e.mu.Unlock()
	defer e.handBack()
	for _, o := range slices.Concat(v.Failed, v.Later) {
		o.giveUp(err)
	}
}
