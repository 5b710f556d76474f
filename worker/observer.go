package worker

import (
	"slices"
	"sync/atomic"
	"time"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Observer hears of the operations of an engine. The timeline is one; metrics are another. Ended is called from many
// goroutines, while none of the engine's locks is held, and must return soon.
type Observer interface {
	// Ended says that the operation is over, with all its exchanges in the order in which they began, not to be changed,
	// and why it has failed; nil for success.
	Ended(o Observed, exchanges []Exchange, err error)
}

// Observed is an operation as observers see it.
type Observed struct {
	Name      string
	Kind      units.Kind
	DType     units.DType
	Shape     []int64 // of the input; not to be changed
	Bytes     int     // of the input
	Submitted time.Time
	Declared  time.Time // when its declaration, for which it waited, was answered; the zero time where it did not wait
}

// Exchange is the exchange of one partition with a server.
type Exchange struct {
	Type      wire.Type // of the request
	Partition uint32
	Server    int // its index
	Iteration uint64
	Sent      int // bytes of tensor or message
	Received  int // bytes of output memory
	Last      int // sums: the rank whose push came last; transfers: the rank that puts; -1 for none
	Times     Times
}

// Times are when the events of an exchange happened; the zero time for those that did not happen.
type Times struct {
	Encode, Encoded   time.Time // the message was made
	Queued, Moved     time.Time // it waited for its server, began to leave
	Sent              time.Time // its memory had left
	Arrived, Received time.Time // the answer's header, its payload
	Answered          time.Time // the output is whole
}

// Observe has an observer hear of the operations that are submitted from now on.
func (e *Engine) Observe(o Observer) {
	e.observers.change(func(l []Observer) []Observer { return append(l, o) })
}

// Unobserve ends Observe. A call that has begun may still be running.
func (e *Engine) Unobserve(o Observer) {
	e.observers.change(func(l []Observer) []Observer { return slices.DeleteFunc(l, func(x Observer) bool { return x == o }) })
}

// observers costs one atomic load at each event where there is none. The list is replaced, never changed.
type observers struct{ list atomic.Pointer[[]Observer] }

func (s *observers) change(to func([]Observer) []Observer) {
	for {
		before := s.list.Load()
		var list []Observer
		if before != nil {
			list = slices.Clone(*before)
		}
		if list = to(list); s.list.CompareAndSwap(before, &list) {
			return
		}
	}
}

func (s *observers) all() []Observer {
	if l := s.list.Load(); l != nil {
		return *l
	}
	return nil
}

// submitted notes when an operation was submitted, if somebody observes.
func (s *observers) submitted(o *operation) {
	if len(s.all()) > 0 {
		o.watched = &watched{submitted: time.Now()}
	}
}

// watched is what observers will hear of an operation. The first two fields are written before its tasks begin.
type watched struct {
	submitted time.Time
	declared  time.Time
	exchanges []Exchange // guarded by the operation's lock
}

// stamps are when events happened to a task: one more than the nanoseconds since its operation was submitted; 0 for never.
type stamps [life.Events + 1]atomic.Int64

// received is the index of the one stamp that is no event of the machine's.
const received = life.Events

func (t *task) stamp(e life.Event) {
	if t.stamps != nil {
		t.stamps[e].Store(int64(time.Since(t.o.watched.submitted)) + 1)
	}
}

func (t *task) times() Times {
	at := func(e life.Event) time.Time {
		if ns := t.stamps[e].Load(); ns != 0 {
			return t.o.watched.submitted.Add(time.Duration(ns - 1))
		}
		return time.Time{}
	}
	return Times{
		Encode: at(life.Encode), Encoded: at(life.Encoded), Queued: at(life.Queue), Moved: at(life.Move), Sent: at(life.Sent),
		Arrived: at(life.Arrive), Received: at(received), Answered: time.Now(),
	}
}

func (s *observers) declared(o *operation) {
	if o.deferred && o.watched != nil {
		o.watched.declared = time.Now()
	}
}

// answered says that a task is answered; last is the answer's Rank.
func (s *observers) answered(t *task, last uint16) {
	if t.stamps == nil {
		return
	}
	x := Exchange{
		Type: t.h.Type, Partition: t.h.Part, Server: t.server, Iteration: t.h.Iteration, Sent: len(t.in), Received: t.received(),
		Last: waitedFor(t, last), Times: t.times(),
	}
	t.o.mu.Lock()
	defer t.o.mu.Unlock()
	t.o.watched.exchanges = append(t.o.watched.exchanges, x)
}

// waitedFor is the rank that an answer had to wait for.
func waitedFor(t *task, last uint16) int {
	switch {
	case t.h.Type == wire.TypePush && t.o.Kind != units.Accumulate:
		return int(last)
	case t.h.Type == wire.TypeGet:
		return int(t.h.Source)
	}
	return -1
}

func (s *observers) ended(o *operation, err error) {
	if o.watched == nil {
		return
	}
	observed := Observed{
		Name: o.name(), Kind: o.Kind, DType: o.DType, Shape: o.Shape, Bytes: len(o.Input),
		Submitted: o.watched.submitted, Declared: o.watched.declared,
	}
	o.mu.Lock()
	exchanges := o.watched.exchanges
	o.mu.Unlock()
	slices.SortFunc(exchanges, func(a, b Exchange) int { return a.Times.begin().Compare(b.Times.begin()) })
	for _, x := range s.all() {
		x.Ended(observed, exchanges, err)
	}
}
