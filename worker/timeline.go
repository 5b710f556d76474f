package worker

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/paceline/paceline/internal/lockorder"
)

// tracer writes the timeline of this rank as a Chrome trace, which Perfetto and chrome://tracing open:
// one row per tensor name, with a slice for the operation, one for its waiting to be declared and one
// for each partition from leaving to the answer. It costs one atomic load when off.
type tracer struct{ on atomic.Pointer[traceFile] }

type traceFile struct {
	mu    lockorder.Mutex
	f     *os.File
	w     *bufio.Writer
	rank  int
	start time.Time
	rows  map[string]int
	first bool
}

// times are the moments of an operation that the timeline shows.
type times struct{ submitted, declared time.Time }

// traceEvent is one event of the trace event format; times in microseconds.
type traceEvent struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"`
	Time  float64        `json:"ts"`
	Dur   float64        `json:"dur,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	Args  map[string]any `json:"args,omitempty"`
}

// StartTimeline begins to write the timeline to path. One that is being written is ended before.
func (e *Engine) StartTimeline(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("%w: timeline: %w", ErrInvalid, err)
	}
	t := &traceFile{f: f, w: bufio.NewWriter(f), rank: e.cfg.Rank, start: time.Now(), rows: map[string]int{}, first: true}
	t.mu.Place(levelWorker, "traceFile")
	_, _ = t.w.WriteString("[")
	t.event(traceEvent{Name: "process_name", Phase: "M", Args: map[string]any{"name": fmt.Sprintf("rank %d", e.cfg.Rank)}})
	if before := e.trace.on.Swap(t); before != nil {
		before.close()
	}
	return nil
}

// StopTimeline ends the timeline; the file is whole after that.
func (e *Engine) StopTimeline() { e.trace.stop() }

func (t *tracer) stop() {
	if f := t.on.Swap(nil); f != nil {
		f.close()
	}
}

func (t *tracer) begin(o *operation) {
	if t.on.Load() != nil {
		o.times.submitted = time.Now()
	}
}

func (t *tracer) declared(o *operation) {
	if f := t.on.Load(); f != nil && o.deferred && !o.times.submitted.IsZero() {
		o.times.declared = time.Now()
		f.slice(o.name(), "DECLARE", o.times.submitted, nil)
	}
}

func (t *tracer) moving(k *task) {
	if t.on.Load() != nil {
		k.left = time.Now()
	}
}

func (t *tracer) answered(k *task) {
	if f := t.on.Load(); f != nil && !k.left.IsZero() {
		f.slice(k.o.name(), k.h.Type.String(), k.left, map[string]any{
			"partition": k.h.Part, "server": k.server, "bytes_out": len(k.in), "bytes_in": len(k.out), "iteration": k.h.Iteration,
		})
	}
}

func (t *tracer) finish(o *operation, err error) {
	f := t.on.Load()
	if f == nil || o.times.submitted.IsZero() {
		return
	}
	args := map[string]any{"dtype": o.DType.String(), "shape": o.Shape, "bytes": len(o.Input)}
	if err != nil {
		args["error"] = err.Error()
	}
	f.slice(o.name(), o.Kind.String(), o.times.submitted, args)
}

func (f *traceFile) slice(row, name string, from time.Time, args map[string]any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	tid, known := f.rows[row]
	if !known {
		tid = len(f.rows) + 1
		f.rows[row] = tid
		f.eventLocked(traceEvent{Name: "thread_name", Phase: "M", TID: tid, Args: map[string]any{"name": row}})
	}
	f.eventLocked(traceEvent{Name: name, Phase: "X", Time: micros(from.Sub(f.start)), Dur: micros(time.Since(from)), TID: tid, Args: args})
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func (f *traceFile) event(ev traceEvent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.eventLocked(ev)
}

func (f *traceFile) eventLocked(ev traceEvent) {
	if f.w == nil {
		return // closed meanwhile
	}
	ev.PID = f.rank
	data, err := json.Marshal(ev)
	if err != nil {
		return
	}
	if !f.first {
		_, _ = f.w.WriteString(",\n")
	}
	f.first = false
	_, _ = f.w.Write(data)
}

func (f *traceFile) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, _ = f.w.WriteString("]\n")
	_ = f.w.Flush()
	_ = f.f.Close()
	f.w = nil
}
