// Package trace writes, checks and merges timelines in the trace event format, which Perfetto and chrome://tracing open:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. A timeline is a JSON array of complete
// events (slices) and metadata events. The slices of one row are disjoint or lie within each other.
package trace

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"
)

// Event is one event. Time and Dur are microseconds; a row is one thread (TID) of one process (PID, a rank).
type Event struct {
	Name  string         `json:"name"`
	Phase string         `json:"ph"` // Slice or Metadata
	Time  float64        `json:"ts"`
	Dur   float64        `json:"dur,omitempty"`
	PID   int            `json:"pid"`
	TID   int            `json:"tid"`
	Args  map[string]any `json:"args,omitempty"`
}

// Phases of events.
const (
	Slice    = "X"
	Metadata = "M"
)

// Names of metadata events.
const (
	ProcessName = "process_name" // Args: name
	ThreadName  = "thread_name"  // Args: name
	// ClockName is an event of our own, which viewers pass over: a Clock in Args.
	ClockName = "paceline_clock"
)

// Clock says when a file's time 0 was. Args of an event named ClockName; the last one in a file counts.
type Clock struct {
	Seconds     float64 `json:"unix_seconds"`             // of time 0, whole ones, by the clock of the rank's host
	Micros      float64 `json:"unix_us"`                  // and the rest: a float64 holds not both to the nanosecond
	Aligned     bool    `json:"aligned"`                  // whether the scheduler's clock is known
	Offset      float64 `json:"offset_us,omitempty"`      // the scheduler's clock minus the host's
	Uncertainty float64 `json:"uncertainty_us,omitempty"` // of Offset: half the time of a round trip
}

// Micros is a duration in the unit of events.
func Micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// Writer writes events one by one. A file that was not closed lacks the closing bracket, which viewers and Read accept.
type Writer struct {
	w     *bufio.Writer
	began bool
}

// NewWriter begins a timeline.
func NewWriter(w io.Writer) *Writer { return &Writer{w: bufio.NewWriter(w)} }

// Write adds an event.
func (w *Writer) Write(e *Event) error {
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	before := ",\n"
	if !w.began {
		before, w.began = "[", true
	}
	_, _ = w.w.WriteString(before)
	_, err = w.w.Write(data)
	return err
}

// Flush hands on what was written.
func (w *Writer) Flush() error { return w.w.Flush() }

// Close ends the timeline. The underlying writer stays open.
func (w *Writer) Close() error {
	end := "]\n"
	if !w.began {
		end = "[]\n"
	}
	_, _ = w.w.WriteString(end)
	return w.w.Flush()
}

// Read reads a timeline. Of one that ends early, as that of a killed process, it returns the whole events and cut.
func Read(r io.Reader) (events []Event, cut bool, err error) {
	d := json.NewDecoder(r)
	if first, err := d.Token(); err != nil || first != json.Delim('[') {
		return nil, false, fmt.Errorf("no timeline: it does not begin with a JSON array")
	}
	for d.More() {
		var e Event
		switch err := d.Decode(&e); {
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
			return events, true, nil
		case err != nil:
			return nil, false, fmt.Errorf("event %d: %w", len(events)+1, err)
		}
		events = append(events, e)
	}
	if _, err := d.Token(); err != nil {
		return events, true, nil
	}
	return events, false, nil
}

// Check reports the first event that breaks the format: an unknown phase, a negative or infinite time, metadata without
// a name, or two slices of a row that overlap without nesting.
func Check(events []Event) error {
	type row struct{ pid, tid int }
	rows := map[row][]*Event{}
	for i := range events {
		e := &events[i]
		if bad := e.check(); bad != "" {
			return fmt.Errorf("event %d, %q: %s", i+1, e.Name, bad)
		}
		if e.Phase == Slice {
			rows[row{e.PID, e.TID}] = append(rows[row{e.PID, e.TID}], e)
		}
	}
	for at, slices := range rows {
		if err := nest(slices); err != nil {
			return fmt.Errorf("process %d, row %d: %w", at.pid, at.tid, err)
		}
	}
	return nil
}

func (e *Event) check() string {
	switch {
	case e.Name == "":
		return "no name"
	case e.Phase == Metadata:
		if name, is := e.Args["name"].(string); e.Name != ClockName && (!is || name == "") {
			return "metadata without a name"
		}
		return ""
	case e.Phase != Slice:
		return fmt.Sprintf("phase %q is neither a slice nor metadata", e.Phase)
	case !(e.Time >= 0 && e.Dur >= 0) || math.IsInf(e.Time+e.Dur, 0):
		return fmt.Sprintf("begins at %v for %v microseconds", e.Time, e.Dur)
	}
	return ""
}

// nest checks that the slices of a row are disjoint or lie within each other, to the nanosecond.
func nest(row []*Event) error {
	end := func(e *Event) float64 { return math.Round((e.Time + e.Dur) * 1e3) }
	slices.SortStableFunc(row, func(a, b *Event) int { return cmp.Or(cmp.Compare(a.Time, b.Time), cmp.Compare(b.Dur, a.Dur)) })
	var open []*Event
	for _, e := range row {
		begin := math.Round(e.Time * 1e3)
		for len(open) > 0 && end(open[len(open)-1]) <= begin {
			open = open[:len(open)-1]
		}
		if len(open) > 0 && end(e) > end(open[len(open)-1]) {
			return fmt.Errorf("%q (at %v for %v) overlaps %q (at %v for %v)", e.Name, e.Time, e.Dur, open[len(open)-1].Name, open[len(open)-1].Time, open[len(open)-1].Dur)
		}
		open = append(open, e)
	}
	return nil
}
