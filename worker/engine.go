// Package worker is the engine inside a training process: it accepts operations on tensors, declares,
// partitions, prioritises, pushes and pulls, and says when each is done.
//
// The way of an operation:
//
//  1. Submit checks it (op.go), counts it under its name and finds its declaration (book.go, names.go, declare.go).
//  2. launch cuts it into tasks, one per partition (operation.go, collectives.go). From here on each task lives for
//     itself (task.go), by the rules of core/task.
//  3. A task whose tensor is coded is encoded first, by priority (encoder.go).
//  4. It waits for its server by priority, under a byte credit (queue.go, traffic.go).
//  5. A way carries it there (way.go): connections (peer.go, link.go), or a call in the same process (local.go).
//  6. The server's answer is read straight into the output memory (link.go), or decoded into it (coding.go).
//  7. With the last task the next stage begins, or Done is called (operation.go).
//
// Beside that: supersteps (superstep.go), changes of conditions (condition.go), joins (join.go), the state of coded
// tensors (state.go, statebytes.go, residuals.go), the search for better settings (tuner.go), observers (observer.go) with the timeline (timeline.go), how fast servers are (profile.go), and how an
// engine ends (end.go); how long it waits for servers (patience.go); messages between two ranks (messages.go). All locks and their order stand in locks.go.
package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/agreement"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/ticks"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// Errors that an operation can end with; test with errors.Is.
var (
	ErrInvalid     = errors.New("invalid operation")
	ErrDuplicate   = errors.New("an operation of that name is in flight")
	ErrMismatch    = errors.New("ranks disagree")
	ErrStall       = errors.New("operation stalled")
	ErrPeerLost    = errors.New("peer lost")
	ErrShutdown    = errors.New("shut down")
	ErrMemory      = errors.New("memory limit")
	ErrUnsupported = errors.New("not possible")
)

// because is an error of one of these kinds whose text says everything.
type because struct {
	kind error
	text string
}

func (b because) Error() string { return b.text }
func (b because) Unwrap() error { return b.kind }

// Invalid makes an error about what was given that is no operation, as a setting, an ErrInvalid with the same text.
func Invalid(err error) error { return because{ErrInvalid, err.Error()} }

// Within is a context for what waits for other ranks: it ends with the engine too, whose Err then says why.
func (e *Engine) Within(limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(e.ctx, limit)
}

// Control is the engine's line to the scheduler.
type Control interface {
	Declare(ctx context.Context, tensors []wire.Tensor) ([]wire.Placed, error)
	// RemoveSet removes a process set, when every worker of the job has asked for it.
	RemoveSet(ctx context.Context, id uint32) error
	ReportLost(wire.Lost)
	// ReportProfile says what this rank has measured of servers; where no line is, it is dropped.
	ReportProfile(wire.Profile)
	// Clock is how far the scheduler's clock is ahead of this host's, and how uncertain that is; false before the first beat.
	Clock() (ahead, uncertain time.Duration, known bool)
	// Whom names the scheduler, and says since when and why there is no line to it.
	Whom() string
}

// Local is the server in this process, if there is one. The done of each operation is called exactly
// once, from any goroutine; the operation's memory is in use until then.
type Local interface {
	Announce(t *wire.Tensor) error
	// Serve handles one partition's request, and does not keep in where that is a message (CodecDeclared).
	Serve(h wire.Header, in, out []byte, done func(answer wire.Header, err error))
	// Hold keeps answers to other ranks back until Release, which the caller calls soon.
	Hold()
	Release()
	Condition(wire.Condition) wire.ConditionReply
	Report(h wire.Header, iteration wire.Report) error
	Cancel(h wire.Header)
	Undeclared(f wire.Failure) error
	// Moved is how many bytes of messages have come in pieces.
	Moved() uint64
	Join()
	// TakeBack says that joins fail, and AllJoined that every rank of the job has joined: to a server that sums for its host.
	TakeBack()
	AllJoined(last int)
	Bye()
	Lost(wire.Lost)
}

// Config says how the engine works.
type Config struct {
	Rank       int
	Membership *membership.View
	Transports *transport.Set
	Control    Control

	PartitionBytes int
	Fusion         int // payloads of up to this many bytes travel together
	Credit         int64
	Conns          int // connections to each server
	DeclareTimeout time.Duration
	PeerTimeout    time.Duration      // for a server that joins to be reached
	Patience       agreement.Patience // with servers' answers
	Profiles       time.Duration      // between two reports of how fast servers are; 0 for none
	Log            *zap.Logger
	Alloc          func(n int) []byte // memory for outputs whose size only the engine knows; nil for Go's
	Tuning         *Tuning            // nil for none
	Crowded        bool               // the job's processes have no core to spare, and all servers are among them
	Gathering      func(Gathering)    // told what becomes of operations that are submitted, by whoever calls Flush; or nil. Must not call back

	Policy     *policy.Policy                            // codecs of operations that name none
	LoadPolicy func(text string) (*policy.Policy, error) // reads what operations name; nil for policy.Parse
	Seed       uint64                                    // of the random numbers that codecs draw
}

// Engine is one worker's engine for one round of the job.
type Engine struct {
	cfg         Config
	paths       atomic.Pointer[[]way] // by server index, then those that sum for this host (way.go); never written to
	hosting     Local                 // the server in this process, where it sums for this host; else nil
	encoder     *encoder
	staging     *mempool.Pool // nil where no server has mapped the arena
	observers   observers
	profiler    *profiler                // nil where nobody asks
	timeline    atomic.Pointer[timeline] // the one that is being written
	wg          sync.WaitGroup           // link readers
	starts      sync.WaitGroup           // a Start that is under way, watch and reports
	cancel      func()                   // ends it
	ctx         context.Context          // of it
	settle      sync.Once
	declares    declareQueue
	conditions  conditions
	busy        occupancy
	opens       int            // connections to each server
	leastCredit int64          // that a search may choose
	origin      time.Time      // from which the machines' times count
	ended       chan struct{}  // closed when everything in flight has been settled after an end
	batches     sync.WaitGroup // that are being launched
	untold      sync.WaitGroup // operations whose Done has not returned
	untoldJoin  sync.WaitGroup // likewise a join
	corked      atomic.Int32   // batches that are being launched: their makers kick the ways
	connected   chan struct{}  // closed when all servers were reached
	turn        chan struct{}  // serialises takeovers by a lost server's heirs

	mu     lockorder.Mutex
	book          // guarded by mu
	gather gather // guarded by mu

	meeting map[int]chan struct{} // servers that have joined and are not reached yet; guarded by mu
}

// New makes an engine. It accepts notices from now on, and operations after Start.
func New(cfg Config) *Engine {
	if cfg.Alloc == nil {
		cfg.Alloc = func(n int) []byte { return make([]byte, n) }
	}
	if cfg.LoadPolicy == nil {
		cfg.LoadPolicy = policy.Parse
	}
	e := &Engine{cfg: cfg, ended: make(chan struct{}), connected: make(chan struct{}), meeting: map[int]chan struct{}{}, turn: make(chan struct{}, 1), origin: time.Now()}
	e.book = newBook(&e.cfg)
	e.opens, e.leastCredit = cfg.Conns, cfg.Credit
	if e.tuner != nil {
		e.opens, e.leastCredit = e.tuner.bounds()
	}
	ways := make([]way, len(e.servers()))
	e.paths.Store(&ways)
	e.gather.crowded = cfg.Crowded
	e.mu.Place(levelWorker, "Engine")
	e.conditions.mu.Place(levelWorker, "conditions")
	e.busy.mu.Place(levelWorker, "occupancy")
	e.encoder = newEncoder(e)
	e.profiler = newProfiler(e)
	e.kept.pool = e.encoder.pool
	e.kept.mu.Place(levelKept, "kept")
	if e.epoch().Elastic {
		e.kept.results, e.kept.given, e.kept.residuals = map[keyOf]*result{}, map[keyOf]given{}, map[keyOf][]residual{}
	}
	if e.gather.reported = e.gather.state(); cfg.Gathering != nil {
		cfg.Gathering(e.gather.reported)
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.declares.start(e)
	return e
}

// Start connects to every server of the job. local is the server in this process, nil if there is
// none or it is reached as the others are, as in an elastic job. After an error the engine is ended.
func (e *Engine) Start(ctx context.Context, local Local) error {
	e.mu.Lock()
	err := e.broken // a peer was lost before
	if err == nil {
		e.starts.Add(1)
	}
	e.mu.Unlock()
	if err == nil {
		err = e.start(ctx, local)
	}
	if broken := e.Err(); broken != nil {
		err = broken // a peer was lost meanwhile: that says more
	}
	if err != nil {
		e.end(err)
		<-e.ended
	}
	return err
}

// start connects, unless the engine ends meanwhile.
func (e *Engine) start(ctx context.Context, local Local) error {
	defer e.starts.Done()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)()
	if local != nil {
		index := e.epoch().Embedded(e.cfg.Rank)
		if len(e.host) > 0 {
			index, e.hosting = e.hostServer(e.cfg.Rank), local
		}
		e.setWay(index, newLocalQueue(e, index, local))
	}
	if err := e.connect(ctx); err != nil {
		return err
	}
	e.starts.Go(e.watch)
	e.starts.Go(func() { ticks.Until(e.ctx.Done(), mempool.RestPeriod, func(time.Time) { e.encoder.pool.Rest() }) })
	if e.profiler != nil {
		e.starts.Go(e.reports)
	}
	return nil
}

// connect opens the connections to all servers at the same time.
func (e *Engine) connect(ctx context.Context) error {
	servers := e.servers()
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, server := range servers {
		if e.wayTo(i) != nil {
			continue
		}
		p := newPeer(e, i, server)
		e.setWay(i, p)
		if server.State == membership.Gone {
			p.hand()
			continue
		}
		wg.Go(func() {
			there, cancel := p.whileThere(ctx)
			defer cancel()
			errs[i] = p.connect(there)
			if errs[i] != nil && !errors.Is(ctx.Err(), context.Canceled) && p.survives(errs[i]) {
				errs[i] = p.accuse(ctx, errs[i])
			}
			if errs[i] != nil && ctx.Err() == nil {
				p.fail(errs[i], errs[i].Error()) // the others end for this server too, and not for this rank
			}
		})
	}
	wg.Wait()
	close(e.connected)
	return errors.Join(errs...)
}

// Submit starts the operations of one group: all are queued, or none and the first one's error is returned.
func (e *Engine) Submit(ops []Op) error {
	for i := range ops {
		if err := ops[i].check(e.cfg.Rank); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	if e.cfg.Tuning != nil {
		if err := e.pace(ops); err != nil {
			return err
		}
	}
	started, due, stopping, err := e.submit(ops)
	if err != nil {
		return err
	}
	if stopping {
		e.excuse()
	}
	for _, o := range started {
		o.launch()
	}
	e.together(due, false)
	return nil
}

// submit puts the operations of a group into the book, if all are admitted, and gives those that start now: alone, or
// together. It also reports whether the end of a superstep is known.
func (e *Engine) submit(ops []Op) (started, due []*operation, stopping bool, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.admit(ops); err != nil {
		return nil, nil, false, err
	}
	e.untold.Add(len(ops))
	for i := range ops {
		o := e.register(&ops[i])
		o.e = e
		if o.Timeout > 0 {
			o.timer = time.AfterFunc(o.Timeout, o.expire)
		}
		e.observers.submitted(o)
		switch {
		case o.gathers():
			e.gather.add(o)
		case !o.deferred:
			started = append(started, o)
		}
	}
	if len(e.undeclared) > 0 {
		e.declares.kick()
	}
	return started, e.leaving(e.gather.due()), e.stopping(), nil
}

// Failed ends an operation that cannot be done on any rank; the server in this process says so.
func (e *Engine) Failed(f wire.Failure) { e.failedAt(e.epoch().Embedded(e.cfg.Rank), f) }

// failedAt is Failed from any server.
func (e *Engine) failedAt(server int, f wire.Failure) {
	err := error(because{failureKind(f.Code), f.Text})
	if f.Name == "" {
		e.joinFails(server, err)
		return
	}
	e.failed(f, err)
}

// failed ends what ends here with an operation that has failed.
func (e *Engine) failed(f wire.Failure, err error) {
	e.mu.Lock()
	v := e.nameFailed(f, err)
	e.lent++
	e.mu.Unlock()
	defer e.handBack()
	for _, o := range v.Failed {
		o.fail(err)
	}
	for _, o := range v.Later {
		o.goWith(reason{f.Code, f.Text}, err)
	}
}

func failureKind(code units.FailureCode) error {
	switch code {
	case units.FailMismatch:
		return ErrMismatch
	case units.FailStall:
		return ErrStall
	case units.FailMemory:
		return ErrMemory
	default:
		return ErrUnsupported
	}
}

// sameStall is for how long servers that warn of one tensor are taken to mean the same.
const sameStall = 5 * time.Second

// Stalled warns the user of ranks that do not come.
func (e *Engine) Stalled(s wire.Stall) {
	if again := e.warns(s.Name); again || len(s.Waiting) > 0 && s.Waiting[0] != e.cfg.Rank {
		return
	}
	of := fmt.Sprint(s.Missing)
	e.mu.Lock()
	defer e.mu.Unlock()
	if one := e.dueOf[of]; one != nil {
		one.others++
		return
	}
	e.dueOf[of] = &lateRanks{first: s}
	time.AfterFunc(sameRanks, func() { e.warnOf(of) })
}

// sameRanks is for how long tensors that wait for the same ranks are gathered into one warning.
const sameRanks = time.Second

// lateRanks are ranks of which a warning is due: what has waited for them first, and how many others.
type lateRanks struct {
	first  wire.Stall
	others int
}

func (e *Engine) warnOf(ranks string) {
	e.mu.Lock()
	one := e.dueOf[ranks]
	delete(e.dueOf, ranks)
	e.mu.Unlock()
	who, what := "has", "it"
	if one.others > 0 {
		who, what = fmt.Sprintf("and %d more have", one.others), "them"
	}
	e.cfg.Log.Warn(fmt.Sprintf("%q %s waited %.0f s for ranks %s, which have not submitted %s", one.first.Name, who, one.first.Seconds, ranks, what))
}

// Lost ends the round on this rank: a peer is gone.
func (e *Engine) Lost(l wire.Lost) {
	if l.Role == wire.RoleWorker && l.Rank == e.cfg.Rank {
		l.Why += " (that is this rank: the others could not reach it)"
	}
	e.mu.Lock()
	if e.lost == nil {
		e.lost = &l
	}
	e.mu.Unlock()
	e.end(fmt.Errorf("%w: %s %d%s is gone: %s", ErrPeerLost, l.Role, l.Rank, e.hostOf(l), l.Why))
}

// Follow goes on in a later epoch of the round, without the ranks and servers that an elastic job has lost, and with servers that have joined it. Operations in flight end as the
// servers say, which wait for those ranks no longer, and those which inherit the keys of those servers.
func (e *Engine) Follow(later *membership.Epoch) {
	e.mu.Lock()
	before := e.epoch()
	news, err := e.cfg.Membership.Follow(later)
	joined, lost := news.Joined, news.Lost
	for _, i := range joined {
		met := make(chan struct{})
		if e.beside(func() { e.meet(i, met) }) {
			e.meeting[i] = met
		}
	}
	for _, d := range lost {
		if i := before.ServerOf(d.Member); i >= 0 {
			e.beside(func() { e.succeed(i, d.Drained) })
		}
	}
	if news.Moved {
		e.beside(e.bring)
	}
	e.mu.Unlock()
	if err != nil {
		e.cfg.Log.Error("an epoch that cannot follow", zap.Uint32("epoch", later.Number), zap.Error(err))
	}
	for _, i := range joined {
		e.cfg.Log.Info("a server has joined the job", zap.Int("server", i), zap.Uint32("epoch", later.Number))
	}
	for _, d := range lost {
		e.cfg.Log.Info("the job goes on without "+d.String(), zap.Uint32("epoch", later.Number), zap.String("why", d.Why))
	}
}

// beside has something be done beside what the engine does, which waits for it at its end. It reports false where the engine has ended. The caller holds the lock.
func (e *Engine) beside(f func()) bool {
	if e.broken != nil {
		return false
	}
	e.starts.Add(1)
	go func() {
		defer e.starts.Done()
		f()
	}()
	return true
}

func (e *Engine) hostOf(l wire.Lost) string {
	m := membership.Member{Role: membership.WorkerRole, Number: l.Rank}
	if l.Role == wire.RoleServer {
		m.Role = membership.ServerRole
	}
	n := e.epoch().Node(m)
	if n == nil {
		return ""
	}
	return fmt.Sprintf(" (host %s, pid %d)", n.Host, n.PID)
}

// Err is why the engine accepts no more operations, nil while it does.
func (e *Engine) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.broken
}

// member finds where this engine's rank lies in an operation's process set.
func (e *Engine) member(o *Op) int { return o.member(e.cfg.Rank) }

// transferServer is the server that carries what rank src puts for allgather and alltoall: its own
// where it has one, so that the bytes cross a link once; else they are dealt out.
func (e *Engine) transferServer(src int, tensor, part uint32) int {
	epoch := e.epoch()
	if own := epoch.Embedded(src); own >= 0 {
		return own
	}
	return (int(tensor) + src + int(part)) % epoch.Founders()
}
