package worker

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/paceline/paceline/internal/lockorder"
)

// timeline is an observer that writes a Chrome trace, which Perfetto and chrome://tracing open: one row per tensor name,
// with a slice for the operation, one for its waiting to be declared and one for each partition, from leaving to the answer.
type timeline struct {
	start time.Time
	mu    lockorder.Mutex
	out   traceFile
}

// traceFile is a file of events.
type traceFile struct {
	f     *os.File
	w     *bufio.Writer // nil when closed
	rank  int
	rows  map[string]int // by tensor name
	first bool
}

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
	t := &timeline{start: time.Now(), out: traceFile{f: f, w: bufio.NewWriter(f), rank: e.cfg.Rank, rows: map[string]int{}, first: true}}
	t.mu.Place(levelWorker, "timeline")
	t.out.begin()
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

// Declared implements Observer.
func (t *timeline) Declared(o Observed) { t.slice(o.Name, "DECLARE", o.Submitted, nil) }

// Exchanged implements Observer.
func (t *timeline) Exchanged(o Observed, x Exchange) {
	t.slice(o.Name, x.Type.String(), x.Began, map[string]any{
		"partition": x.Partition, "server": x.Server, "bytes_out": x.Sent, "bytes_in": x.Received, "iteration": x.Iteration,
	})
}

// Ended implements Observer.
func (t *timeline) Ended(o Observed, err error) {
	args := map[string]any{"dtype": o.DType.String(), "shape": o.Shape, "bytes": o.Bytes}
	if err != nil {
		args["error"] = err.Error()
	}
	t.slice(o.Name, o.Kind.String(), o.Submitted, args)
}

func (t *timeline) slice(row, name string, from time.Time, args map[string]any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.out.write(traceEvent{
		Name: name, Phase: "X", Time: micros(from.Sub(t.start)), Dur: micros(time.Since(from)), TID: t.out.row(row), Args: args,
	})
}

func (t *timeline) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.out.close()
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

func (f *traceFile) begin() {
	_, _ = f.w.WriteString("[")
	f.write(traceEvent{Name: "process_name", Phase: "M", Args: map[string]any{"name": fmt.Sprintf("rank %d", f.rank)}})
}

// row is the number of a tensor's row.
func (f *traceFile) row(name string) int {
	tid, known := f.rows[name]
	if !known {
		tid = len(f.rows) + 1
		f.rows[name] = tid
		f.write(traceEvent{Name: "thread_name", Phase: "M", TID: tid, Args: map[string]any{"name": name}})
	}
	return tid
}

func (f *traceFile) write(ev traceEvent) {
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
	if f.w == nil {
		return
	}
	_, _ = f.w.WriteString("]\n")
	_ = f.w.Flush()
	_ = f.f.Close()
	f.w = nil
}
