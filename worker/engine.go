// Package worker is the engine inside a training process: it takes operations on tensors, declares,
// partitions, prioritises, pushes and pulls, and says when each is done.
//
// The way of an operation:
//
//  1. Submit checks it, counts it under its name and finds its declaration (names.go, declare.go).
//  2. launch cuts it into tasks, one per partition (operation.go, collectives.go).
//  3. A task whose tensor is coded is encoded first, by priority (encoder.go).
//  4. It waits in the queue of its server, by priority, under a byte credit (peer.go), or takes
//     the in-process way (local.go).
//  5. The server's answer is read straight into the output memory (link.go), or decoded into it (coding.go).
//  6. With the last task the next stage begins, or Done is called.
package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/core/policy"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/lockorder"
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

// Control is the engine's line to the scheduler.
type Control interface {
	Declare(ctx context.Context, tensors []wire.Tensor) ([]wire.Placed, error)
	ReportLost(wire.Lost)
}

// Local is the server in this process, if there is one. The done of each operation is called exactly
// once, from any goroutine; the operation's memory is in use until then.
type Local interface {
	Announce(t *wire.Tensor) error
	// Serve takes in one partition's request, and does not keep in where that is a message (CodecDeclared).
	Serve(h wire.Header, in, out []byte, done func(divisor uint32, err error))
	Condition(wire.Condition) wire.ConditionReply
	Report(h wire.Header, iteration wire.Report) error
	Cancel(h wire.Header)
	Join()
	Bye()
	Lost(wire.Lost)
}

// Config says how the engine works.
type Config struct {
	Rank       int
	Membership *membership.View
	Transports *transport.Set
	Control    Control
	Local      Local // nil where this process holds no server

	PartitionBytes int
	Fusion         int // payloads of up to this many bytes travel together
	Credit         int64
	Conns          int // connections to each server
	DeclareTimeout time.Duration
	Log            *zap.Logger
	Alloc          func(n int) []byte // memory for outputs whose size only the engine knows; nil for Go's

	Policy     *policy.Policy                            // codecs of operations that name none
	LoadPolicy func(text string) (*policy.Policy, error) // reads what operations name; nil for policy.Parse
	Seed       uint64                                    // of the random numbers that codecs draw
}

// Engine is one worker's engine for one round of the job.
type Engine struct {
	cfg        Config
	ways       []way // by server index; nil before Start
	encoder    *encoder
	trace      tracer
	wg         sync.WaitGroup  // link readers
	starts     sync.WaitGroup  // a Start that is under way
	cancel     func()          // ends it
	ctx        context.Context // of it
	settle     sync.Once
	conditions conditions
	busy       occupancy
	origin     time.Time     // from which the machines' times count
	ended      chan struct{} // closed when everything in flight has been settled after an end

	mu        lockorder.Mutex
	names     map[nameID]*nameState
	inflight  map[*operation]struct{}
	declares  declareQueue
	unclaimed map[stateID]*saved        // what was set before its tensors are declared
	policies  map[string]*policy.Policy // that operations have named, by their text
	joining   *joinState
	leaders   map[uint32]*declaration // first values of groups with supersteps, by tensor
	warned    map[string]time.Time    // when a server last warned of a stall
	broken    error                   // why the engine takes no more operations
	lost      *wire.Lost
}

// New makes an engine. It takes notices from now on, and operations after Start.
func New(cfg Config) *Engine {
	if cfg.Alloc == nil {
		cfg.Alloc = func(n int) []byte { return make([]byte, n) }
	}
	if cfg.LoadPolicy == nil {
		cfg.LoadPolicy = policy.Parse
	}
	e := &Engine{
		cfg: cfg, ways: make([]way, len(cfg.Membership.Now().Servers)), ended: make(chan struct{}), origin: time.Now(),
		names: map[nameID]*nameState{}, inflight: map[*operation]struct{}{}, leaders: map[uint32]*declaration{}, warned: map[string]time.Time{}, policies: map[string]*policy.Policy{},
	}
	e.mu.Place(levelWorker, "Engine")
	e.conditions.mu.Place(levelWorker, "conditions")
	e.busy.mu.Place(levelWorker, "occupancy")
	e.encoder = newEncoder(e)
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.declares.start(e)
	return e
}

// Start connects to every server of the job. local is the server in this process, nil if there is
// none. After an error the engine is ended.
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
		e.ways[index] = newLocalQueue(e, index, local)
	}
	return e.connect(ctx)
}

// connect opens the connections to all servers at the same time.
func (e *Engine) connect(ctx context.Context) error {
	servers := e.epoch().Servers
	errs := make([]error, len(servers))
	var wg sync.WaitGroup
	for i, server := range servers {
		if e.ways[i] != nil {
			continue
		}
		p := newPeer(e, i, server)
		e.ways[i] = p
		wg.Go(func() { errs[i] = p.connect(ctx) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// epoch is the current membership.
func (e *Engine) epoch() *membership.Epoch { return e.cfg.Membership.Now() }

// Submit starts the operations of one group: all are queued, or none and the first one's error is returned.
func (e *Engine) Submit(ops []Op) error {
	for i := range ops {
		if err := ops[i].check(e.cfg.Rank); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	e.mu.Lock()
	if err := e.admit(ops); err != nil {
		e.mu.Unlock()
		return err
	}
	started := make([]*operation, len(ops))
	for i := range ops {
		started[i] = e.register(&ops[i])
	}
	e.declares.flush()
	stopping := e.stopping()
	e.mu.Unlock()
	if stopping {
		e.excuse()
	}
	for _, o := range started {
		o.begin()
	}
	return nil
}

// admit checks what depends on the other operations in flight. Callers hold mu.
func (e *Engine) admit(ops []Op) error {
	if e.broken != nil {
		return e.broken
	}
	if e.joining != nil {
		return fmt.Errorf("%w: this rank has joined and waits for the others", ErrInvalid)
	}
	if len(e.inflight)+len(ops) > limits.MaxHandles {
		return fmt.Errorf("%w: %d operations in flight, limit %d; synchronise some first", ErrMemory, len(e.inflight), limits.MaxHandles)
	}
	seen := map[nameID]struct{}{}
	for i := range ops {
		if err := e.checkCodec(&ops[i]); err != nil {
			return err
		}
		if ops[i].Name == "" {
			continue
		}
		if err := e.checkValue(&ops[i]); err != nil {
			return err
		}
		id := nameID{ops[i].Set.ID, ops[i].Name}
		_, twice := seen[id]
		if n := e.names[id]; twice || n != nil && n.InFlight() > 0 {
			return fmt.Errorf("%w: %q on rank %d; synchronise it first, or give the tensors different names", ErrDuplicate, ops[i].Name, e.cfg.Rank)
		}
		seen[id] = struct{}{}
	}
	return nil
}

// checkValue finds uses of a held value that come before its declaration, or after it once more. Callers
// hold mu.
func (e *Engine) checkValue(op *Op) error {
	if op.Kind != units.Accumulate {
		return nil
	}
	known := false
	if n := e.names[nameID{op.Set.ID, op.Name}]; n != nil {
		known = e.find(n, op) != nil
	}
	if !known && op.Use != units.Declare {
		return fmt.Errorf("%w: %q has no value with these properties on rank %d: declare it first, on every rank (again after a join, or after it failed)", ErrInvalid, op.Name, e.cfg.Rank)
	}
	if known && op.Use == units.Declare {
		return fmt.Errorf("%w: %q has a value already on rank %d", ErrInvalid, op.Name, e.cfg.Rank)
	}
	return nil
}

// Failed ends an operation that cannot be done on any rank; the server says so.
func (e *Engine) Failed(f wire.Failure) {
	err := fmt.Errorf("%w: %s", failureKind(f.Code), f.Text)
	if f.Name == "" {
		e.failJoin(err)
		return
	}
	e.mu.Lock()
	v := e.nameFailed(f, err)
	e.mu.Unlock()
	for _, o := range v.Failed {
		o.fail(err)
	}
	for _, o := range v.Later {
		o.giveUp(err)
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
	e.mu.Lock()
	again := time.Since(e.warned[s.Name]) < sameStall
	e.warned[s.Name] = time.Now()
	e.mu.Unlock()
	if again {
		return
	}
	e.cfg.Log.Warn(fmt.Sprintf("%q has waited %.0f s for ranks %v, which have not submitted it", s.Name, s.Seconds, s.Missing))
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

// Err is why the engine takes no more operations, nil while it does.
func (e *Engine) Err() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.broken
}

// end stops the engine: connections are closed, and once nobody touches their memory any more the
// operations in flight end with err. It returns at once; ended is closed when all is settled.
func (e *Engine) end(err error) {
	e.mu.Lock()
	if e.broken == nil {
		e.broken = err
	}
	err = e.broken
	e.mu.Unlock()
	e.settle.Do(func() {
		go func() {
			e.declares.stop(e, err)
			e.cancel()
			e.starts.Wait()
			e.passOn()
			e.each(way.close)
			e.wg.Wait()
			for _, o := range e.operations() {
				o.fail(e.explain(o, err))
			}
			e.encoder.close()
			e.failJoin(err)
			e.trace.stop()
			close(e.ended)
		}()
	})
}

// farewellTime bounds how long an engine that ends for a lost peer waits until the others have heard why.
const farewellTime = 500 * time.Millisecond

// passOn tells the servers of the lost peer for which this engine ends, so that nobody takes the
// closing of its connections, or of those to the server in this process, for the loss.
func (e *Engine) passOn() {
	e.mu.Lock()
	lost := e.lost
	e.mu.Unlock()
	if lost == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewellTime)
	defer cancel()
	e.lastWords(ctx, func(w way) []chan struct{} { return w.lost(*lost) })
}

// explain adds to the reason of an end which tensor waited, on which rank.
func (e *Engine) explain(o *operation, err error) error {
	return fmt.Errorf("%v of %q on rank %d: %w", o.Kind, o.name(), e.cfg.Rank, err)
}

func (e *Engine) operations() []*operation {
	e.mu.Lock()
	defer e.mu.Unlock()
	ops := make([]*operation, 0, len(e.inflight))
	for o := range e.inflight {
		ops = append(ops, o)
	}
	return ops
}

// Shutdown says goodbye to the servers and ends what is in flight. It waits for that until ctx ends.
func (e *Engine) Shutdown(ctx context.Context) {
	e.mu.Lock()
	alive := e.broken == nil
	if alive {
		e.broken = fmt.Errorf("%w: the engine of rank %d was shut down", ErrShutdown, e.cfg.Rank)
	}
	err := e.broken
	e.mu.Unlock()
	if alive {
		for _, o := range e.operations() {
			o.giveUp(e.explain(o, err))
		}
		e.goodbye(ctx)
	}
	e.end(err)
	<-e.ended
}

// goodbye tells every server that this worker leaves. The servers close the connections when they have
// read it: if this end closed one on which a report of theirs is on its way, what is still to be read
// there would be lost.
func (e *Engine) goodbye(ctx context.Context) {
	e.lastWords(ctx, way.bye)
	closed := make(chan struct{})
	go func() {
		e.wg.Wait()
		close(closed)
	}()
	select {
	case <-closed:
	case <-ctx.Done():
	}
}

// lastWords has every way say its last word and waits until that has left.
func (e *Engine) lastWords(ctx context.Context, say func(way) []chan struct{}) {
	var said []chan struct{}
	e.each(func(w way) { said = append(said, say(w)...) })
	for _, s := range said {
		select {
		case <-s:
		case <-ctx.Done():
			return
		}
	}
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
	return (int(tensor) + src + int(part)) % len(epoch.Servers)
}
