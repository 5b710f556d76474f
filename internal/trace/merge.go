package trace

import (
	"encoding/json"
	"fmt"
	"math"
)

// File is the timeline of one rank.
type File struct {
	Name   string
	Events []Event
}

// Merge puts the timelines of several ranks into one, on the scheduler's clock; the earliest event is at 0. The warnings
// name files whose clock is the host's own, because their rank had heard no beat of the scheduler. Two files of one rank
// are an error, as is a file that breaks the format.
func Merge(files []File) (events []Event, warnings []string, err error) {
	starts, origin, ranks := make([]float64, len(files)), math.Inf(1), map[int]string{}
	var second float64 // from which starts count
	for i, f := range files {
		if err := Check(f.Events); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		clock, pid, err := clockOf(f.Events)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", f.Name, err)
		}
		if before, twice := ranks[pid]; twice {
			return nil, nil, fmt.Errorf("%s and %s are both of rank %d", before, f.Name, pid)
		}
		ranks[pid] = f.Name
		if !clock.Aligned {
			warnings = append(warnings, fmt.Sprintf("%s: its clock is its host's, not the scheduler's", f.Name))
		}
		if i == 0 {
			second = clock.Seconds
		}
		starts[i] = (clock.Seconds-second)*1e6 + clock.Micros + clock.Offset
		for j := range f.Events {
			if e := &f.Events[j]; e.Phase == Slice {
				origin = min(origin, starts[i]+e.Time)
			}
		}
	}
	for i, f := range files {
		for _, e := range f.Events {
			if e.Name == ClockName {
				continue
			}
			if e.Phase == Slice {
				// Both ends are rounded alike, so that slices which nest still do.
				begin, end := shift(e.Time, starts[i]-origin), shift(e.Time+e.Dur, starts[i]-origin)
				e.Time, e.Dur = begin, math.Round((end-begin)*1e3)/1e3
			}
			events = append(events, e)
		}
	}
	return events, warnings, nil
}

func shift(t, by float64) float64 { return math.Round((t+by)*1e3) / 1e3 }

// clockOf finds a file's clock and its rank.
func clockOf(events []Event) (clock Clock, pid int, err error) {
	found := false
	for _, e := range events {
		if e.Name != ClockName {
			continue
		}
		data, err := json.Marshal(e.Args)
		if err == nil {
			err = json.Unmarshal(data, &clock)
		}
		if err != nil {
			return clock, 0, fmt.Errorf("clock: %w", err)
		}
		found, pid = true, e.PID
	}
	if !found {
		return clock, 0, fmt.Errorf("no clock in it: is it a timeline of this release?")
	}
	return clock, pid, nil
}
