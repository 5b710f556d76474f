package worker

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/core/agreement"
	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// operation is one submitted Op on its way.
//
// Invariants: Done is called once, when no goroutine touches the operation's memory any more; pending
// counts the tasks of the present stage that are not settled, plus one while the stage is launched;
// an operation with an error launches no further tasks.
type operation struct {
	Op
	e         *Engine
	n         *nameState
	d         *declaration // nil if it failed before it began
	seq       uint64       // count under its name
	iteration uint64       // count under its declaration
	epoch     uint32       // membership epoch in which it was submitted
	deferred  bool         // it waits for its declaration, or for operations before it
	held      bool         // it waits for operations of its name before it; guarded by the engine's lock
	gathered  bool         // it is, or was, held for a batch
	climb     *climb       // that it is; else nil
	beside    bool         // it is no use of the name, but a question to servers, which no other rank knows of

	pending atomic.Int32

	mu        lockorder.Mutex
	err       error
	abandoned bool // the servers have been informed and the tasks that have not begun are dropped
	tasks     []*task
	room      []task  // reduceTasks' memory
	list      []*task // of them
	next      func()  // what follows the present stage; nil for the end

	sizes   []byte // allgather, alltoall: the exchanged numbers of rows
	out     Output
	behind  uint32         // send: by how many numbers the oldest one in flight is before it
	urgency int            // send: the given priority, while the operation has a higher one
	watched *watched       // nil where nobody observes
	timer   *time.Timer    // of the operation's own timeout; nil for none
	asked   bool           // the timeout has passed, and the home server is asked who did not come
	wait    agreement.Wait // Engine.look's
}

// launch starts the first stage: bringing servers' residuals back, where a state has been set.
func (o *operation) launch() {
	o.e.observers.declared(o)
	if o.failed() {
		o.finish()
		return
	}
	if tasks := o.restoring(); len(tasks) > 0 {
		o.run(tasks, o.first)
		return
	}
	o.first()
}

func (o *operation) failed() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err != nil
}

// run queues the tasks of one stage; next follows when all are settled.
func (o *operation) run(tasks []*task, next func()) {
	for _, t := range tasks {
		t.start()
	}
	o.mu.Lock()
	if o.err != nil {
		tasks = nil
	}
	o.next, o.tasks = next, tasks
	o.pending.Store(int32(len(tasks)) + 1)
	o.mu.Unlock()
	for _, t := range tasks {
		switch {
		case t.later:
		case t.encode:
			o.e.encoder.push(t)
		default:
			t.way().push(t)
		}
	}
	if o.e.corked.Load() == 0 { // else whoever launches the batch does it
		var kicked way
		for _, t := range tasks {
			if w := t.way(); !t.encode && w != kicked {
				w.kick(false)
				kicked = w
			}
		}
	}
	o.complete()
}

// complete settles one task of the stage; the last one leads on.
func (o *operation) complete() {
	if o.pending.Add(-1) > 0 {
		return
	}
	o.mu.Lock()
	next := o.next
	if o.err != nil {
		next = nil
	}
	o.mu.Unlock()
	if next != nil {
		next()
		return
	}
	o.finish()
}

func (o *operation) finish() {
	if o.climb != nil {
		o.climb.finish()
		return
	}
	if o.timer != nil {
		o.timer.Stop()
	}
	o.mu.Lock()
	err, e, done, out := o.err, o.e, o.Done, o.out
	again := err == nil && o.timer == nil && !o.abandoned && len(o.room) > 0 && o.d.coding == nil && !o.beside && o.Kind != units.Alltoall // of which abandoned puts may still be queued
	o.tasks = nil
	o.abandoned = true // nothing is left to abandon
	o.mu.Unlock()
	e.observers.ended(o, err)
	e.forget(o, again)
	done(out, err)
	e.untold.Done()
}

// setErr notes why the operation fails; the first reason counts.
func (o *operation) setErr(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
}

// fail gives the operation up for a reason that the other ranks hear of by themselves: the servers are
// informed, tasks that have not begun are dropped, and those under way are waited for before Done.
func (o *operation) fail(err error) { o.abandon(err, nil) }

// giveUp is fail for a reason of this rank's own: the servers tell the other ranks. What this rank begins from here on under
// the name is declared anew, as theirs will be. (Of a held value that is declared the others go on.)
func (o *operation) giveUp(err error) { o.goWith(o.reason(err), err) }

// goWith is giveUp for what the other ranks are told: a reason of this operation, or the failure of one before it.
func (o *operation) goWith(told reason, err error) {
	if o.abandon(err, &told) && o.d != nil && !o.beside && (o.Kind != units.Accumulate || o.tensor() == 0) {
		o.e.failed(wire.Failure{Code: told.code, Text: told.text, Name: o.name(), ProcessSet: o.Set.ID, Generation: o.d.t.Generation, Seq: o.seq}, err)
	}
}

// reason is what the other ranks are told of a failure; without text, what the servers say of this rank.
type reason struct {
	code units.FailureCode
	text string
}

// reason is what the other ranks hear where this rank gives the operation up. The end of the engine they hear of otherwise, and of a
// held value that is declared nothing: they go on.
func (o *operation) reason(err error) reason {
	switch {
	case o.d == nil || o.e.Err() != nil:
		return reason{}
	case o.tensor() == 0:
		return reason{codeOf(err), err.Error()}
	case o.Kind == units.Accumulate:
		return reason{}
	}
	return reason{units.FailUnsupported, fmt.Sprintf("%q was given up by rank %d: %v", o.name(), o.e.cfg.Rank, err)}
}

// abandon is done once, also where a broken connection has noted its error before; it reports whether this was the time.
func (o *operation) abandon(err error, own *reason) bool {
	o.setErr(err)
	o.mu.Lock()
	again := o.abandoned
	o.abandoned = true
	tasks := o.tasks
	o.mu.Unlock()
	if again {
		return false
	}
	if o.Kind.Message() {
		o.withdraw(tasks)
		return true
	}
	o.informServers(own)
	for _, t := range tasks {
		t.happened(life.Abandon)
	}
	if o.e.stopAwaiting(o) {
		o.launch() // which only ends it
	}
	return true
}

// informServers cancels the tensor from this iteration on wherever it has keys. Where this rank is the first to give it up, own is the reason for
// the others, which goes ahead: whoever hears of the operation first, hears why.
func (o *operation) informServers(own *reason) {
	if o.d == nil || o.beside {
		return
	}
	o.e.mu.Lock()
	id, held := o.d.t.ID, o.held
	o.e.mu.Unlock()
	switch {
	case held: // servers have nothing of it, but a rank may bring it that has heard of a failure before it: in a later generation, which that failure spares
		if own != nil && own.text != "" {
			o.tell(*own)
		}
		return
	case id == 0:
		if own != nil {
			o.tell(*own)
		}
		return
	}
	if own != nil && own.text != "" && o.Kind != units.Accumulate {
		o.tell(*own)
	}
	h := wire.Header{Type: wire.TypeCancel, Epoch: o.epoch, Rank: uint16(o.e.cfg.Rank), Tensor: id, Iteration: o.iteration, Seq: o.seq}
	if own != nil {
		h.Flags = wire.FlagOwnWill
	}
	if o.Kind == units.Accumulate && o.Use == units.Declare {
		h.Flags |= wire.FlagDeclare
	}
	for i, w := range o.e.ways() {
		switch {
		case w == nil:
		case !o.e.ofHost(i):
			w.cancel(o.d, h)
		case o.d.host != nil: // the home server tells the others
			heard := h
			heard.Flags &^= wire.FlagOwnWill
			w.cancel(o.d, heard)
		}
	}
}

// failure is what a server hears where this rank gives the operation up.
func (o *operation) failure(why reason) (wire.Header, wire.Failure) {
	h := wire.Header{Type: wire.TypeFail, Epoch: o.epoch, Rank: uint16(o.e.cfg.Rank), Seq: o.seq}
	return h, wire.Failure{
		Code: why.code, Name: o.name(), ProcessSet: o.Set.ID, Generation: o.d.t.Generation, Seq: o.seq, Text: why.text, Ranks: o.d.t.Ranks,
	}
}

// tensor is the number of its tensor, 0 before it is declared.
func (o *operation) tensor() uint32 {
	o.e.mu.Lock()
	defer o.e.mu.Unlock()
	return o.d.t.ID
}

// tell tells all servers why this rank gives the operation up. Where it has not declared the tensor it does not know the
// name's home, where others that have declared theirs wait.
func (o *operation) tell(why reason) {
	if why.text == "" {
		o.mu.Lock()
		why = reason{codeOf(o.err), o.err.Error()}
		o.mu.Unlock()
	}
	h, f := o.failure(why)
	for i, w := range o.e.ways() {
		if w != nil && !o.e.ofHost(i) {
			w.undeclared(h, f)
		}
	}
}
