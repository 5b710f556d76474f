package trace_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/trace"
)

func slice(row int, name string, from, dur float64) trace.Event {
	return trace.Event{Name: name, Phase: trace.Slice, Time: from, Dur: dur, TID: row}
}

func clockEvent(rank int, start, offset float64, aligned bool) trace.Event {
	return trace.Event{Name: trace.ClockName, Phase: trace.Metadata, PID: rank, Args: map[string]any{
		"unix_seconds": 1700000000, "unix_us": start, "offset_us": offset, "aligned": aligned, "uncertainty_us": 5.0,
	}}
}

func TestSlicesOfARowNestOrAreDisjoint(t *testing.T) {
	nested := []trace.Event{slice(1, "a", 0, 10), slice(1, "b", 2, 3), slice(1, "c", 5, 5), slice(1, "d", 10, 1), slice(2, "e", 5, 20)}
	if err := trace.Check(nested); err != nil {
		t.Error(err)
	}
	for why, bad := range map[string]trace.Event{
		"overlaps":              slice(1, "f", 9, 2),
		"begins at":             slice(3, "f", -1, 2),
		"no name":               slice(3, "", 1, 2),
		"neither a slice":       {Name: "f", Phase: "B"},
		"metadata without a na": {Name: trace.ThreadName, Phase: trace.Metadata},
	} {
		if err := trace.Check(append(nested, bad)); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", why, err)
		}
	}
}

func TestAFileThatEndsEarlyKeepsItsWholeEvents(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b)
	for _, name := range []string{"a", "b", "c"} {
		e := slice(1, name, 1, 2)
		if err := w.Write(&e); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for n := range b.Len() {
		events, cut, err := trace.Read(bytes.NewReader(b.Bytes()[:n]))
		if n > 0 && (err != nil || cut != (n < b.Len()-1) || len(events) > 3) {
			t.Errorf("%d bytes: %d events, cut %v, %v", n, len(events), cut, err)
		}
	}
	if _, _, err := trace.Read(strings.NewReader(`{"a": 1}`)); err == nil {
		t.Error("an object is read as a timeline")
	}
}

func TestMergedTimelinesAreOnTheSchedulersClock(t *testing.T) {
	files := []trace.File{
		{Name: "a", Events: []trace.Event{clockEvent(0, 1000, 0, true), slice(1, "a", 50, 10)}},
		{Name: "b", Events: []trace.Event{clockEvent(1, 5000, -3990, true), slice(1, "b", 10, 10)}}, // begins at 1020 of the scheduler's
	}
	files[1].Events[1].PID = 1
	events, warnings, err := trace.Merge(files)
	if err != nil || len(warnings) > 0 || len(events) != 2 {
		t.Fatal(events, warnings, err)
	}
	if events[0].Time != 30 || events[1].Time != 0 || events[0].Dur != 10 {
		t.Errorf("%+v", events)
	}
	files[1].Events[0] = clockEvent(1, 5000, 0, false)
	if _, warnings, err = trace.Merge(files); err != nil || len(warnings) != 1 || !strings.Contains(warnings[0], "b:") {
		t.Error(warnings, err)
	}
	files[1].Events[0].PID = 0
	if _, _, err = trace.Merge(files); err == nil || !strings.Contains(err.Error(), "both of rank 0") {
		t.Error(err)
	}
	files[1].Events = files[1].Events[1:]
	if _, _, err = trace.Merge(files); err == nil || !strings.Contains(err.Error(), "b: no clock") {
		t.Error(err)
	}
}
