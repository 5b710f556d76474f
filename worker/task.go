package worker

import (
	"sync/atomic"
	"time"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/transport/wire"
)

// task moves one partition between this worker and one server. It is its operation's until it is queued; from then on
// in and message belong to whoever has begun to encode or to move it, and out to whoever reads its answer.
type task struct {
	o         *operation
	h         wire.Header
	server    int
	sentBack  int          // how often a server has sent it away
	elsewhere atomic.Int32 // the server that it was sent to instead, plus one; 0: none
	in        []byte       // what leaves
	out       []byte       // where the answer goes
	answer    bool         // whether there is one
	encode    bool         // in has to be encoded first
	placed    bool         // in says where the input lies, in memory that the server has mapped
	place     [wire.PlaceSize]byte
	staged    bool   // what has left says where a copy of the input lies
	sum       []byte // the answer where that was staged, if it is kept
	message   []byte // memory that in lies in, for the encoder to have back
	cover     *cover // of a held value in an elastic job: what the answer covers
	rows      *rows  // that the answer has pieces of, instead of out; else nil
	later     bool   // it is queued after the others of its stage
	settled   func() // is called when it is done with, before its operation goes on; nil for nobody
	ahead     int64  // of it, what counts as not having left; guarded by the encoder's lock

	state  atomic.Uint32 // life.State: several goroutines step it, each where something happens
	order  uint64        // of its coming, for the queue that it is in
	stamps *stamps       // nil where nobody observes
	begun  time.Time     // when it went to its connection, for the profiler
	halted time.Time     // when its server turned out to be lost, drained or without its key; zero for never

	finished func(answer wire.Header, err error) // for the server in this process; nil before the first use
}

// followsResidual reports whether the task goes where this rank knows its key's residual to be, in an elastic job, and behind what this
// rank carries there: the sum that it is in is encoded with that, or it asks for it.
func (t *task) followsResidual() bool { return t.h.Type == wire.TypePush || t.h.Type == wire.TypeState }

// start begins the task's life.
func (t *task) start() {
	t.state.Store(uint32(life.New(t.way().mode(t))))
	if t.o.watched != nil {
		t.stamps = new(stamps)
	}
}

// redirect has the task go to another server than its own.
func (t *task) redirect(server int) { t.elsewhere.Store(int32(server + 1)) }

func (t *task) way() way {
	if n := t.elsewhere.Load(); n > 0 {
		return t.o.e.wayTo(int(n) - 1)
	}
	return t.o.e.wayTo(t.server)
}

// at is the server that the task waits for: the one that it was sent to instead of its own, and the heir of one that has gone.
func (t *task) at() int {
	server := t.server
	if n := t.elsewhere.Load(); n > 0 {
		server = int(n) - 1
	}
	if p, reached := t.o.e.wayTo(server).(*peer); reached && p.gone() {
		if heir, reached := p.heir(t).(*peer); reached {
			server = heir.index
		}
	}
	return server
}

// step tells the task's machine what happens.
func (t *task) step(e life.Event) life.Effects {
	t.stamp(e) // before, because whoever sees the step reads the time
	for {
		was := t.state.Load()
		is, effects := life.State(was).Step(e)
		if t.state.CompareAndSwap(was, uint32(is)) {
			return effects
		}
	}
}

// weight is the number of bytes that the server has to handle, wherever they lie.
func (t *task) weight() int {
	if t.placed {
		return len(t.out)
	}
	return len(t.in)
}

// received is how many bytes the answer may bring.
func (t *task) received() int {
	if t.rows != nil {
		return int(t.rows.most(t.rows.index(t.h.Part)))
	}
	return len(t.out)
}

// begin says what is about to happen to the task, and reports whether it may. Locks may be held.
func (t *task) begin(e life.Event) bool { return t.step(e)&life.Refused == 0 }

// happened says what has happened to the task, and does what follows from it. Behind a step that does not settle the task
// another goroutine may, and then a task that nothing was encoded for, and that was not abandoned, is used again.
func (t *task) happened(e life.Event) {
	o, encode, settled := t.o, t.encode, t.settled
	t.follow(o, encode, settled, t.step(e))
}

// follow does what follows from a step.
func (t *task) follow(o *operation, encode bool, settled func(), effects life.Effects) {
	if effects&life.Forget != 0 { // it was abandoned
		t.way().forget(t)
	}
	if effects&life.Release != 0 && encode {
		o.e.encoder.sent(t)
	}
	if effects&life.Settle != 0 {
		if settled != nil {
			settled()
		}
		o.complete()
	}
}

func (t *task) abandoned() bool { return life.State(t.state.Load()).Abandoned() }
