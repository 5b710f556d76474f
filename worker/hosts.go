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
	if !membership.SumFirst(len(d.host), d.t.Bytes()) {
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

// climb takes sums of this host to their server, one after the other, as operations that are no use of this rank's.
//
// Whoever gives up a sum on its way drops the climb.
type climb struct {
	*ascent // the last one. The next uses its memory, unless somebody looks at operations without the lock
	answer  wire.Header
	back    func(wire.Header, error)

	begun, ended bool // guarded by the engine's lock: a sum is on its way; there will be no more
}

// ascent is a sum on its way.
type ascent struct {
	operation
	only  task
	tasks [1]*task
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
		u.e.wayTo(i).kick(false)
	}
}

// Open makes climbs of a tensor's sums. A sum's memory is its answer's.
func (u *Uplink) Open(t *wire.Tensor) func(back func(wire.Header, error)) (push func(wire.Header, []byte), abandon func()) {
	d := &declaration{t: *t, placed: &membership.Tensor{Servers: t.Servers}}
	return func(back func(wire.Header, error)) (func(wire.Header, []byte), func()) {
		c := &climb{back: back}
		return func(h wire.Header, sum []byte) { c.push(u.e, d, h, sum) }, func() { c.giveUp(u.e) }
	}
}

// push sends a sum on its way, in memory that the answer replaces.
func (c *climb) push(e *Engine, d *declaration, h wire.Header, sum []byte) {
	if !c.enter(e, d, &h) {
		c.back(wire.Header{}, inprocess.ErrCancelled)
		return
	}
	o, t := &c.operation, &c.only
	h.Rank, h.Epoch = uint16(e.cfg.Rank), o.epoch
	*t = task{o: o, h: h, server: d.placed.Servers[h.Part], out: sum, answer: true}
	if t.in = sum; h.Flags&wire.FlagEmpty != 0 {
		t.in = nil
	}
	t.start()
	o.mu.Lock()
	failed := o.err != nil // it was given up since, or the engine has ended
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
}

// enter puts the operation into the book, unless the engine has ended, or the climb.
func (c *climb) enter(e *Engine, d *declaration, h *wire.Header) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c.ended || e.broken != nil {
		return false
	}
	c.begun = true
	if c.ascent == nil || e.lent > 0 {
		c.ascent = new(ascent)
	}
	o := &c.operation
	*o = operation{e: e, d: d, beside: true, climb: c, seq: h.Seq, iteration: h.Iteration, epoch: e.epoch().Joins}
	o.mu.Place(levelWorker, "operation")
	o.Op = Op{Kind: d.t.Kind, DType: d.t.DType, ReduceOp: d.t.Op, Name: d.t.Name, Set: wire.ProcessSet{ID: d.t.ProcessSet, Ranks: d.t.Ranks}, Declared: d.t.Declared}
	o.Priority = e.priorityOf(d)
	e.climbs[o] = struct{}{}
	return true
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

// giveUp ends the climb, and the sum that is on its way.
func (c *climb) giveUp(e *Engine) {
	e.mu.Lock()
	c.ended = true
	begun, s := c.begun, c.ascent
	e.mu.Unlock()
	if begun {
		s.fail(inprocess.ErrCancelled)
	}
}

// finish hands the answer to the server in this process.
func (c *climb) finish() {
	o := &c.operation
	o.mu.Lock()
	err, e := o.err, o.e
	o.tasks, o.abandoned = nil, true
	o.mu.Unlock()
	e.mu.Lock()
	delete(e.climbs, o)
	c.begun = false
	broken := e.broken
	e.mu.Unlock()
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
	if f.Name == "" { // a join, which the servers of the job fail too
		return
	}
	err := error(because{failureKind(f.Code), f.Text})
	e.mu.Lock()
	v := e.nameFailed(f, err)
	e.lent++
	e.mu.Unlock()
	defer e.handBack()
	for _, o := range slices.Concat(v.Failed, v.Later) {
		o.goWith(reason{f.Code, f.Text}, err)
	}
}
