package worker

import (
	"cmp"
	"maps"
	"slices"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// traffic is what waits for one server, is under way to it, or is expected from it. It decides what leaves next, and
// on which connection. It has no lock: peer keeps it behind its own.
//
// Invariants:
//
//  1. inFlight is the number of tensor bytes that have been given to the connections, or are lent with what has been, and that the
//     server has not reported as consumed. No task leaves while it is at the credit or above, so that an urgent one never
//     waits behind more than that.
//  2. On each connection a tensor's announcement leaves before everything else about the tensor.
//  3. What a rank does with one partition of a held value uses one connection, so that a read does not overtake the
//     push before it; in an elastic job so does what may have the residual of a partition of a coded sum go ahead of it. How it
//     begins or ends messages uses the first, so that these keep their order; all else uses any of the first active ones.
type traffic struct {
	rank     int
	credit   int64
	inFlight int64
	queue    taskQueue // of what may use any connection
	conns    []*connTraffic
	active   int // connections that what may use any uses; 0: all
	answers  map[answerID]*task
	arena    transport.Arena         // memory of this process that the server has mapped, on every connection; nil for none
	staging  *mempool.Pool           // what of that partitions are staged in; nil for none
	stages   map[answerID]*stage     // what of it the server may write
	taken    map[answerID]wire.Taken // of which messages the next answers to receives are, where their senders are to hear of that
	unsent   []*task                 // that a broken connection did not send
	left     bool                    // the server said goodbye
	gone     error                   // it has closed since; what still wants it fails
	broken   bool                    // a connection has ended: what fails to leave has not been lent
	elastic  bool                    // the job goes on where a server is lost
	kept     *kept                   // the residuals that go ahead of pushes
	server   int                     // its index
	late     []wire.Header           // ends of messages that were withdrawn since its connections have ended
	ended    bool                    // its connections have: tasks wait for its heirs
	lost     bool                    // they go to its heirs
}

// connTraffic is what uses one connection.
type connTraffic struct {
	index     int
	control   []outbox.Frame // go before all tasks
	announced map[uint32]struct{}
	queue     taskQueue // of what must use this connection
	travelled uint64    // tensor bytes given to it
	sent      uint64    // they, and those that what was given to it lends
	consumed  uint64    // of them, what the server has consumed
}

type answerID struct {
	tensor      uint32
	part        uint32
	seq         uint64
	source      uint16
	destination uint16
	offset      uint32
}

func idOf(h *wire.Header) answerID {
	return answerID{h.Tensor, h.Part, h.Seq, h.Source, h.Destination, h.Offset}
}

// open adds a connection.
func (f *traffic) open() *connTraffic {
	c := &connTraffic{index: len(f.conns), announced: map[uint32]struct{}{}}
	f.conns = append(f.conns, c)
	return c
}

// add queues a task and makes ready for its answer. The error is that of a server that has left.
func (f *traffic) add(t *task) error {
	if f.gone != nil && !t.abandoned() {
		return f.gone
	}
	if !t.begin(life.Queue) {
		return nil
	}
	if t.answer {
		f.answers[idOf(&t.h)] = t
	}
	queue := &f.queue
	switch {
	case len(f.conns) == 0: // it was lost before it was reached
	case t.h.Type.OfMessage():
		queue = &f.conns[0].queue
	case len(f.conns) > 1 && (t.o.Kind == units.Accumulate || f.elastic && t.o.d.coding != nil && t.followsResidual()):
		queue = &f.conns[(t.h.Tensor+t.h.Part)%uint32(len(f.conns))].queue // as what is supplied of it
	}
	queue.push(t)
	return nil
}

// next is the frame to leave on a connection, if its payload is of at most limit bytes: control frames first, then
// the most urgent task, before its tensor's first use the announcement, and before what follows them the residuals that this rank carries to its key.
//
// What is staged has to be copied there before the frame leaves.
func (f *traffic) next(c *connTraffic, limit int) (outbox.Frame, *stage, bool) {
	if len(c.control) > 0 {
		if len(c.control[0].Payload) > limit {
			return outbox.Frame{}, nil, false
		}
		frame := c.control[0]
		c.control = c.control[1:]
		return frame, nil, true
	}
	for {
		t, queue := f.ready(c)
		if t == nil || len(t.in) > limit {
			return outbox.Frame{}, nil, false
		}
		if _, announced := c.announced[t.h.Tensor]; !announced && t.o.d != asPieces {
			frame := announcement(&t.o.d.t, f.rank)
			if len(frame.Payload) > limit {
				frame.Owner.Sent(nil)
				return outbox.Frame{}, nil, false
			}
			c.announced[t.h.Tensor] = struct{}{}
			return frame, nil, true
		}
		if f.elastic && t.followsResidual() {
			residual, flags, ok := f.kept.carried(keyOf{t.h.Tensor, t.h.Part}, f.server, limit)
			if !ok {
				return outbox.Frame{}, nil, false
			}
			if residual != nil {
				h := wire.Header{Type: wire.TypeResidual, Flags: t.h.Flags&wire.FlagAuthenticated | flags, DType: units.Float32, Epoch: t.h.Epoch, Tensor: t.h.Tensor, Part: t.h.Part, Seq: t.h.Seq, Iteration: t.h.Iteration, Rank: t.h.Rank}
				return outbox.Frame{Header: h, Payload: residual}, nil, true
			}
		}
		if queue.pop(life.Move) {
			frame := outbox.Frame{Header: t.h, Payload: t.in, Owner: t}
			s := f.stage(t)
			if s != nil {
				frame = s.frame(t)
			}
			f.inFlight += int64(t.weight())
			c.sent += uint64(t.weight())
			c.travelled += uint64(len(frame.Payload))
			return frame, s, true
		}
	}
}

// ready is the most urgent task that may leave on a connection now, with its queue; nil if there is none.
func (f *traffic) ready(c *connTraffic) (*task, *taskQueue) {
	if f.ended || f.inFlight >= f.credit {
		return nil, nil
	}
	own := c.queue.peek()
	if f.active > 0 && c.index >= f.active {
		return own, &c.queue
	}
	shared := f.queue.peek()
	if own.before(shared) {
		return own, &c.queue
	}
	return shared, &f.queue
}

// waiting reports whether anything could leave on a connection now.
func (f *traffic) waiting(c *connTraffic) bool {
	t, _ := f.ready(c)
	return len(c.control) > 0 || t != nil
}

// consumed notes how many of a connection's bytes the server has consumed; credit comes back.
func (f *traffic) consumed(c *connTraffic, bytes uint64) {
	if bytes > c.consumed && bytes <= c.sent {
		f.inFlight -= int64(bytes - c.consumed)
		c.consumed = bytes
	}
}

// answered is the task that an answer belongs to, nil if nobody waits for it any more, and what was staged for it. Whoever gets it
// writes its memory.
func (f *traffic) answered(h *wire.Header) (*task, *stage) {
	id := idOf(h)
	t, s := f.answers[id], f.stages[id]
	delete(f.stages, id)
	if t == nil {
		return nil, s
	}
	delete(f.answers, id)
	if !t.placed && !t.begin(life.Arrive) { // what is lent has been the server's to write since it left
		return nil, s
	}
	return t, s
}

// forget drops what is awaited for a task.
func (f *traffic) forget(t *task) {
	if id := idOf(&t.h); f.answers[id] == t {
		delete(f.answers, id)
	}
}

// behind queues a control frame about a tensor, behind the tensor's announcement.
func (f *traffic) behind(c *connTraffic, d *declaration, frame outbox.Frame) {
	if _, announced := c.announced[frame.Tensor]; !announced {
		c.announced[frame.Tensor] = struct{}{}
		c.control = append(c.control, announcement(&d.t, f.rank))
	}
	c.control = append(c.control, frame)
}

// tasks are all that the server is still wanted for.
func (f *traffic) tasks() []*task {
	tasks := slices.Concat(f.queue.tasks, f.unsent, slices.Collect(maps.Values(f.answers)))
	for _, c := range f.conns {
		tasks = append(tasks, c.queue.tasks...)
	}
	return tasks
}

// empty removes and returns them, each once: messages in the order in which they were submitted.
func (f *traffic) empty() []*task {
	tasks := f.tasks()
	f.queue.tasks, f.unsent = nil, nil
	for _, c := range f.conns {
		c.queue.tasks = nil
	}
	clear(f.answers)
	clear(f.taken)
	slices.SortFunc(tasks, func(a, b *task) int { return cmp.Compare(a.o.seq, b.o.seq) })
	seen := map[*task]bool{}
	return slices.DeleteFunc(tasks, func(t *task) bool {
		again := seen[t]
		seen[t] = true
		return again
	})
}

// reset forgets which tensors were announced to the server.
func (f *traffic) reset() {
	for _, c := range f.conns {
		clear(c.announced)
	}
}

// announcement is the frame that announces a tensor to the server.
func announcement(t *wire.Tensor, rank int) outbox.Frame {
	f, err := outbox.JSON(wire.Header{Type: wire.TypeAnnounce, Rank: uint16(rank), Tensor: t.ID}, t)
	if err != nil {
		panic(err) // a struct of numbers and strings; NaN scales are refused at submission
	}
	return f
}
