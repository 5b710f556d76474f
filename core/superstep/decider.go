package superstep

import (
	"sort"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/rankset"
)

// Decider says where supersteps end, for one group of values. It is not safe for concurrent use.
//
// One that takes the place of another, which is lost, begins like any other and learns from each rank where that is (Worker.Again).
//
// Invariants, checked after every call in builds with the tag "invariants":
//
//  1. The superstep is the least that a live rank is in, and current ranks are in it; the others have ended it.
//  2. No rank that is in the superstep waits for an answer.
//  3. Once the end of the superstep is decided, every live rank that is in it has been sent its stop.
//  4. It is decided where a rank has ended it.
type Decider struct {
	rule    condition.Rule
	strides []condition.Stride // of the live ranks, in rising order
	places  []place            // of the same ranks

	superstep uint64
	current   int  // ranks that are in it
	waiting   int  // ranks that wait for an answer
	decided   bool // where it ends
	by        condition.Thresholds
	stops     []Stop
}

// place is in which superstep a rank is.
type place struct {
	superstep uint64
	told      bool // it has been sent its stop
}

// Outputs are what a call leads to.
type Outputs struct {
	Stops     []Stop               // to send, in this order; overwritten by the next call
	From, To  condition.Thresholds // thresholds of the decision before and of this one, where they differ
	Superstep uint64               // that runs now
	Advanced  bool                 // it has begun with this call
}

// NewDecider makes the decider of a group that begins with these ranks.
func NewDecider(model condition.Supersteps, live rankset.Set) *Decider {
	d := &Decider{rule: model.Rule()}
	d.by = d.rule.Thresholds()
	d.setLive(live)
	return d
}

// Superstep is the number of supersteps that all live ranks have ended.
func (d *Decider) Superstep() uint64 { return d.superstep }

// Hear takes a report. One of a rank that does not take part, of a superstep that its rank has ended, or of an iteration
// that has been heard of counts for nothing.
func (d *Decider) Hear(in Report, at time.Duration) Outputs {
	d.stops = d.stops[:0]
	i := d.find(in.Rank)
	switch {
	case i < 0:
		if in.Asks {
			d.stops = append(d.stops, Stop{Rank: in.Rank, Superstep: in.Superstep, Asked: in.Iteration})
		}
		return Outputs{Stops: d.stops, Superstep: d.superstep}
	case in.Superstep < d.places[i].superstep:
		return Outputs{Superstep: d.superstep}
	}
	if in.Superstep > d.places[i].superstep { // it has overtaken the report that ends the superstep before, or that went to another decider
		d.move(i, in.Superstep)
	}
	s := &d.strides[i]
	if in.Iteration <= s.Done && !in.Empty {
		return d.proceed()
	}
	if !in.Empty {
		if s.Done > 0 {
			// Another iteration's report may have been overtaken, and the one before may be an answer to a new decider, in the middle of this.
			s.Gap = max((at-s.At)/time.Duration(in.Iteration-s.Done), in.Interval, 1)
		}
		s.Done = in.Iteration
		s.Pushed, s.At, s.Interval, s.Occupancy = s.Pushed+1, at, in.Interval, in.Occupancy
	}
	if in.Last {
		d.move(i, in.Superstep+1)
	} else if in.Asks && !s.Waits {
		s.Waits = true
		d.waiting++
	}
	return d.proceed()
}

// Live changes who takes part. A rank that comes where the end of the superstep is decided ends it with its first
// iteration.
func (d *Decider) Live(live rankset.Set) Outputs {
	d.stops = d.stops[:0]
	d.setLive(live)
	return d.proceed()
}

func (d *Decider) setLive(live rankset.Set) {
	ranks := live.Ranks()
	strides, places := make([]condition.Stride, len(ranks)), make([]place, len(ranks))
	d.current, d.waiting = 0, 0
	for k, rank := range ranks {
		strides[k].Rank, places[k].superstep = rank, d.superstep
		if i := d.find(rank); i >= 0 {
			strides[k], places[k] = d.strides[i], d.places[i]
		}
		if !strides[k].Ended {
			d.current++
		}
		if strides[k].Waits {
			d.waiting++
		}
	}
	d.strides, d.places = strides, places
}

// find is the place of a live rank, -1 for another.
func (d *Decider) find(rank int) int {
	i := sort.Search(len(d.strides), func(i int) bool { return d.strides[i].Rank >= rank })
	if i == len(d.strides) || d.strides[i].Rank != rank {
		return -1
	}
	return i
}

// move has a rank go on to a later superstep.
func (d *Decider) move(i int, superstep uint64) {
	s := &d.strides[i]
	if !s.Ended {
		d.current--
	}
	if s.Waits {
		d.waiting--
	}
	s.Done, s.Gap, s.Waits, s.Ended, s.Stop = 0, 0, false, true, 0
	d.places[i] = place{superstep: superstep}
}

// proceed decides what can be decided now, for as many supersteps as all live ranks have ended.
func (d *Decider) proceed() (out Outputs) {
	for len(d.strides) > 0 {
		d.advance(&out)
		d.decide(&out)
		d.tell()
		if d.current > 0 {
			break
		}
	}
	out.Stops, out.Superstep = d.stops, d.superstep
	if invariant.On {
		d.check()
	}
	return out
}

// advance begins the next superstep if all live ranks have ended this one.
func (d *Decider) advance(out *Outputs) {
	if d.current > 0 {
		return
	}
	d.superstep = d.places[0].superstep
	for _, p := range d.places {
		d.superstep = min(d.superstep, p.superstep)
	}
	for i := range d.strides {
		if d.places[i].superstep == d.superstep {
			d.strides[i].Ended = false
			d.current++
		}
	}
	d.decided, out.Advanced = false, true
}

// decide has the rule say where the superstep ends, if it can. A rank that has ended it without this decider's word has that of one which is lost: then
// the others end it with their next iteration.
func (d *Decider) decide(out *Outputs) {
	if d.current < len(d.strides) {
		d.decided = true
	}
	if d.decided || !d.rule.Due(d.strides) {
		return
	}
	d.decided = true
	if by := d.rule.Thresholds(); by != d.by {
		if out.From == (condition.Thresholds{}) {
			out.From = d.by
		}
		out.To, d.by = by, by
	}
}

// tell sends each rank that is in the superstep its stop, once, and an answer if it waits for one.
func (d *Decider) tell() {
	if !d.decided && d.waiting == 0 {
		return
	}
	for i := range d.strides {
		s, p := &d.strides[i], &d.places[i]
		if s.Ended || !s.Waits && (p.told || !d.decided) {
			continue
		}
		if d.decided && s.Stop == 0 { // it has come since
			s.Stop = s.Done + 1
		}
		stop := Stop{Rank: s.Rank, Superstep: d.superstep, Iteration: s.Stop, Thresholds: d.by}
		if s.Waits {
			stop.Asked = s.Done
		}
		d.stops = append(d.stops, stop)
		p.told = d.decided
		if !s.Waits {
			continue
		}
		s.Waits = false
		d.waiting--
		if s.Stop > 0 && s.Done >= s.Stop {
			d.move(i, d.superstep+1)
		}
	}
}

// check holds the decider against the invariants at its type.
func (d *Decider) check() {
	current, waiting := 0, 0
	for i, s := range d.strides {
		p := d.places[i]
		invariant.Check(s.Ended == (p.superstep > d.superstep) && p.superstep >= d.superstep, "1: rank %d is in superstep %d, ended %t, of %d", s.Rank, p.superstep, s.Ended, d.superstep)
		if s.Waits {
			waiting++
		}
		if s.Ended {
			continue
		}
		current++
		invariant.Check(!s.Waits, "2: rank %d waits for an answer in superstep %d", s.Rank, d.superstep)
		invariant.Check(p.told == d.decided, "3: rank %d is told %t where superstep %d ends, decided %t", s.Rank, p.told, d.superstep, d.decided)
	}
	invariant.Check(d.decided || current == len(d.strides), "4: %d of %d ranks are in superstep %d, whose end is not decided", current, len(d.strides), d.superstep)
	invariant.Check(current == d.current && waiting == d.waiting && (current > 0 || len(d.strides) == 0), "1: %d ranks in superstep %d and %d wait, of %d and %d", current, d.superstep, waiting, d.current, d.waiting)
}
