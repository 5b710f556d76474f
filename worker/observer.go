package worker

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// Observer hears of the operations of an engine. The timeline is one; metrics are another. Its methods are called from many
// goroutines, while none of the engine's locks is held, and must return soon.
type Observer interface {
	// Declared says that the operation has waited for its declaration since it was submitted.
	Declared(o Observed)
	// Exchanged says that one partition of the operation is answered.
	Exchanged(o Observed, x Exchange)
	// Ended says that the operation is over, and why it has failed; nil for success.
	Ended(o Observed, err error)
}

// Observed is an operation as observers see it.
type Observed struct {
	Name      string
	Kind      units.Kind
	DType     units.DType
	Shape     []int64 // of the input; not to be changed
	Bytes     int     // of the input
	Submitted time.Time
}

// Exchange is the exchange of one partition with a server.
type Exchange struct {
	Type      wire.Type // of the request
	Partition uint32
	Server    int // its index
	Iteration uint64
	Sent      int       // bytes of tensor or message
	Received  int       // bytes of output memory
	Began     time.Time // when the request began to leave
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
		o.submitted = time.Now()
	}
}

func (s *observers) declared(o *operation) {
	if !o.deferred || o.submitted.IsZero() {
		return
	}
	for _, x := range s.all() {
		x.Declared(o.observed())
	}
}

// moving notes when a task begins to leave.
func (s *observers) moving(t *task) {
	if !t.o.submitted.IsZero() {
		t.left = time.Now()
	}
}

func (s *observers) answered(t *task) {
	if t.left.IsZero() {
		return
	}
	for _, x := range s.all() {
		x.Exchanged(t.o.observed(), Exchange{
			Type: t.h.Type, Partition: t.h.Part, Server: t.server, Iteration: t.h.Iteration, Sent: len(t.in), Received: len(t.out), Began: t.left,
		})
	}
}

func (s *observers) ended(o *operation, err error) {
	if o.submitted.IsZero() {
		return
	}
	for _, x := range s.all() {
		x.Ended(o.observed(), err)
	}
}

func (o *operation) observed() Observed {
	return Observed{Name: o.name(), Kind: o.Kind, DType: o.DType, Shape: o.Shape, Bytes: len(o.Input), Submitted: o.submitted}
}
