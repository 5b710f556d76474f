package worker

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/internal/trace"
)

// timeline is an observer that writes a trace (internal/trace). A tensor has a row; an operation on it is a slice, which
// holds its wait for the declaration and the exchange of each partition: encode, queue, send, wait, receive, decode.
// Exchanges at the same time are in further rows.
type timeline struct {
	engine *Engine
	start  time.Time

	mu  lockorder.Mutex
	out traceFile
}

// clockEvery is the time between notes of the scheduler's clock. A process that is killed leaves the last one.
const clockEvery = 10 * time.Second

// traceFile is a file of events.
type traceFile struct {
	f     *os.File // nil when closed
	w     *trace.Writer
	rank  int
	lanes map[string][]traceRow // by tensor name
	rows  int
	noted time.Time // when the clock was written
	err   error     // the first failure of a write
}

// traceRow is a row of the trace, which is free from an instant on.
type traceRow struct {
	row  int
	free time.Time
}

// StartTimeline begins to write the timeline to path. One that is being written is ended before.
func (e *Engine) StartTimeline(path string) error {
	e.StopTimeline() // it may be the same file
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("%w: timeline: %w", ErrInvalid, err)
	}
	t := &timeline{engine: e, start: time.Now(), out: traceFile{f: f, w: trace.NewWriter(f), rank: e.cfg.Rank, lanes: map[string][]traceRow{}}}
	t.mu.Place(levelWorker, "timeline")
	t.out.name(trace.ProcessName, 0, fmt.Sprintf("rank %d", e.cfg.Rank))
	t.out.clock(t)
	e.replaceTimeline(t)
	return nil
}

// StopTimeline ends the timeline; the file is whole after that.
func (e *Engine) StopTimeline() { e.replaceTimeline(nil) }

// replaceTimeline has the new timeline observe before it can be found, so that whoever replaces that one ends it.
func (e *Engine) replaceTimeline(t *timeline) {
	if t != nil {
		e.Observe(t)
	}
	if before := e.timeline.Swap(t); before != nil {
		e.Unobserve(before)
		before.close()
	}
}

// Ended implements Observer.
func (t *timeline) Ended(o Observed, exchanges []Exchange, err error) {
	args := map[string]any{"dtype": o.DType.String(), "shape": o.Shape, "bytes": o.Bytes}
	if err != nil {
		args["error"] = err.Error()
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.out.f == nil || o.Submitted.Before(t.start) { // closed meanwhile, or of the timeline before
		return
	}
	own := t.out.lane(o.Name, 0, o.Submitted, now)
	t.slice(own, o.Kind.String(), o.Submitted, now, args)
	if !o.Declared.IsZero() {
		t.slice(own, "declare", o.Submitted, o.Declared, nil)
	}
	within := o.Declared // the operation's own row is free for an exchange from here on
	for _, x := range exchanges {
		if begin := x.Times.begin(); !begin.Before(within) {
			within = x.Times.Answered
			t.exchange(own, x)
		} else {
			t.exchange(t.out.lane(o.Name, own, begin, x.Times.Answered), x)
		}
	}
	if now.Sub(t.out.noted) > clockEvery {
		t.out.clock(t)
	}
}

// exchange writes the slices of one.
func (t *timeline) exchange(row int, x Exchange) {
	s := &x.Times
	t.slice(row, fmt.Sprintf("%v %d", x.Type, x.Partition), s.begin(), s.Answered, map[string]any{
		"partition": x.Partition, "server": x.Server, "bytes_out": x.Sent, "bytes_in": x.Received, "iteration": x.Iteration,
	})
	wait := "wait"
	if x.Last >= 0 {
		wait = fmt.Sprintf("wait for rank %d", x.Last)
		if x.Last == t.out.rank {
			wait = "wait for the server" // nobody came later
		}
	}
	t.stage(row, "encode", s.Encode, s.Encoded)
	t.stage(row, "queue", s.Queued, s.Moved)
	if s.Received.IsZero() { // the server in this process reads the tensor where it is
		t.stage(row, wait, s.Moved, s.Answered)
		return
	}
	sent, arrived := s.Sent, s.Arrived
	if arrived.IsZero() { // the sum is where the tensor is: nothing has to be received
		arrived = s.Received
	}
	if sent.IsZero() || sent.After(arrived) { // the answer overtook the end of sending
		sent = arrived
	}
	t.stage(row, "send", s.Moved, sent)
	t.stage(row, wait, sent, arrived)
	t.stage(row, "receive", arrived, s.Received)
	t.stage(row, "decode", s.Received, s.Answered)
}

func (s *Times) begin() time.Time {
	if !s.Encode.IsZero() {
		return s.Encode
	}
	return s.Queued
}

// stage is a slice that is left out where it did not happen or took no time.
func (t *timeline) stage(row int, name string, from, to time.Time) {
	if !from.IsZero() && from.Before(to) {
		t.slice(row, name, from, to, nil)
	}
}

func (t *timeline) slice(row int, name string, from, to time.Time, args map[string]any) {
	begin := from.Sub(t.start)
	t.out.write(&trace.Event{Name: name, Phase: trace.Slice, Time: trace.Micros(begin), Dur: trace.Micros(to.Sub(from)), TID: row, Args: args})
}

func (t *timeline) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.out.clock(t)
	if err := t.out.close(); err != nil {
		t.engine.cfg.Log.Warn("the timeline is not whole", zap.String("file", t.out.f.Name()), zap.Error(err))
	}
	t.out.f = nil
}

// lane is the row of a tensor that is free from an instant on, but for the row taken; from then on it is occupied.
func (f *traceFile) lane(name string, taken int, from, to time.Time) int {
	lanes := f.lanes[name]
	i := slices.IndexFunc(lanes, func(l traceRow) bool { return l.row != taken && !l.free.After(from) })
	if i < 0 {
		f.rows++
		i = len(lanes)
		lanes = append(lanes, traceRow{row: f.rows})
		f.lanes[name] = lanes
		title := name
		if i > 0 {
			title = fmt.Sprintf("%s (%d)", name, i+1)
		}
		f.name(trace.ThreadName, f.rows, title)
	}
	lanes[i].free = to
	return lanes[i].row
}

func (f *traceFile) name(what string, row int, name string) {
	f.write(&trace.Event{Name: what, Phase: trace.Metadata, TID: row, Args: map[string]any{"name": name}})
}

// clock notes when time 0 was, and hands on what was written before.
func (f *traceFile) clock(t *timeline) {
	f.noted = time.Now()
	ahead, uncertain, known := t.engine.cfg.Control.Clock()
	f.write(&trace.Event{Name: trace.ClockName, Phase: trace.Metadata, Args: map[string]any{
		"unix_seconds": t.start.Unix(), "unix_us": float64(t.start.Nanosecond()) / 1e3,
		"aligned": known, "offset_us": trace.Micros(ahead), "uncertainty_us": trace.Micros(uncertain),
	}})
	f.err = cmp.Or(f.err, f.w.Flush())
}

func (f *traceFile) write(e *trace.Event) {
	e.PID = f.rank
	f.err = cmp.Or(f.err, f.w.Write(e))
}

func (f *traceFile) close() error {
	f.err = cmp.Or(f.err, f.w.Close(), f.f.Close())
	return f.err
}
