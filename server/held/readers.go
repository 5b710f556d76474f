package held

import (
	"slices"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// readers is what a value's lock guards: the value, and the ranks that wait for it. The machine decides whom a push
// sets free; replies are returned to be sent without the lock.
type readers struct {
	contents
	machine *condition.Machine
	outputs []condition.Output
	changes room.Changes
	changed []room.Change // of them those of the user that hold, or are to
	tuned   uint64        // V from which the conditions of the value's tuner hold

	over     bool        // it was given up
	known    bool        // the root's value has come
	declared rankset.Set // ranks that wait for that, or have it
	before   uint64      // coded: iterations that the tensor had before it was declared, as the rank says that knows of most
	waiting  []reader

	inherited   *inherited // of an elastic job's value; else nil
	whereabouts room.Whereabouts
	past        room.Tally // counted by machines before this one
}

// newReaders makes what is behind the lock of a value that has not begun.
func newReaders(p *room.Part, m *condition.Machine, copies *Copies) readers {
	s := readers{contents: newContents(p, copies), machine: m}
	if p.Carried() {
		s.inherited = &inherited{senders: map[int]room.Sender{}}
	}
	return s
}

// reader is a rank that waits for the value.
type reader struct {
	rank   int
	to     room.Reply
	h      wire.Header // of its push or pull
	since  time.Time
	warned time.Time
	early  bool   // it waits for the value to begin, or to go on here
	brings []byte // its push then, lent
}

func (r *reader) has(f wire.Flags) bool { return r.h.Flags&f != 0 }

// reply is what is to be sent.
type reply struct {
	reader
	kind kind
	answer
	waited  time.Duration
	covers  []byte          // what the value has in it; nil where nobody asks
	pull    condition.Model // of what comes: of the tuner that it has
	leaving wire.Flags      // of what is given: FlagLast where the server is about to leave
	err     error           // instead of the value; ErrCancelled for what its rank has given up itself
}

// kind is what a reply is.
type kind uint8

const (
	answers kind = iota
	moves        // the request is for the server that has the value now
	gives        // the value, which that server is to have
	leaves       // to the value's tuner: it is not here any more
	comes        // or it goes on here
)

// push adds what a rank brings, and reports whether it was taken.
func (s *readers) push(r *reader, b []byte) (replies []reply, taken bool) {
	s.inherited.uses(r)
	switch {
	case r.has(wire.FlagDeclare):
		if !s.known {
			s.known = true
			s.sum(b, 1/s.unit()) // the root's value
		}
		return s.declare(r), true
	case s.inherited.waits():
		return s.comeEarly(r, b), false
	case s.inherited.has(r): // its rank waits for the answer of the server that has added it
	case r.has(wire.FlagWithin):
		s.inherited.decided(r)
		if err := s.add(r, b); err != nil {
			return []reply{{reader: *r, err: err}}, false
		}
	default:
		if replies, taken = s.step(condition.Push(r.rank, r.h.Iteration, r.h.Significance), r, b, nil); !taken {
			return replies, false
		}
	}
	if !r.has(wire.FlagNoPull) {
		replies = s.ask(r, replies)
	}
	return replies, true
}

// pull asks for the value.
func (s *readers) pull(r *reader) []reply {
	s.inherited.uses(r)
	switch {
	case r.has(wire.FlagDeclare):
		return s.declare(r)
	case s.inherited.waits():
		return s.comeEarly(r, nil)
	}
	return s.ask(r, nil)
}

// declare waits until every rank has come for the root's value, so that ranks which disagree about it are
// found out before anyone goes on.
func (s *readers) declare(r *reader) []reply {
	s.declared.Add(r.rank)
	s.inherited.came(r.rank)
	s.before = max(s.before, uint64(r.h.Before))
	if err := s.wait(r); err != nil {
		return []reply{{reader: *r, err: err}}
	}
	return s.open(nil)
}

func (s *readers) wait(r *reader) error {
	if err := s.Round.Pool.Charge(room.WaitingBytes); err != nil {
		return room.MemoryError{Err: err}
	}
	r.since = time.Now()
	s.waiting = append(s.waiting, *r)
	return nil
}

// keep has these readers, and no others of those that waited, wait on.
func (s *readers) keep(kept []reader) {
	s.Round.Pool.Refund((len(s.waiting) - len(kept)) * room.WaitingBytes)
	s.waiting = kept
}

// opened reports whether every rank has come for the root's value.
func (s *readers) opened() bool {
	return s.inherited.begun() || s.known && s.declared.Covers(s.machine.Live())
}

// open answers those who wait for the root's value.
func (s *readers) open(replies []reply) []reply {
	if s.inherited.waits() {
		return s.begin(replies)
	}
	if !s.opened() {
		return replies
	}
	return s.answer(func(r *reader) bool { return r.has(wire.FlagDeclare) }, replies)
}

// ask has the machine decide when the rank gets the value.
func (s *readers) ask(r *reader, replies []reply) []reply {
	if err := s.wait(r); err != nil {
		return append(replies, reply{reader: *r, err: err})
	}
	if r.has(wire.FlagNow) {
		return s.answer(func(w *reader) bool { return w.rank == r.rank && w.h.Seq == r.h.Seq }, replies)
	}
	replies, _ = s.step(condition.Pull(r.rank, r.h.Iteration), r, nil, replies)
	return replies
}

// step drives the machine for a reader, or for nobody. b is what a push adds, nil for nothing; taken reports that the machine
// did not refuse.
func (s *readers) step(in condition.Input, r *reader, b []byte, replies []reply) (_ []reply, taken bool) {
	s.outputs = s.machine.Step(in, s.outputs[:0])
	taken = true
	for _, o := range s.outputs {
		switch o.Kind {
		case condition.Admit:
			s.inherited.decided(r)
			if r == nil { // its rank is elsewhere, and adds nothing
				continue
			}
			if err := s.add(r, b); err != nil {
				taken = false
				replies = append(replies, reply{reader: *r, err: err})
			}
		case condition.Drop, condition.Duplicate:
			s.inherited.decided(r)
		case condition.Answer:
			replies = s.answer(func(w *reader) bool {
				return w.rank == o.Rank && w.h.Iteration == o.Progress && !w.has(wire.FlagDeclare|wire.FlagNow)
			}, replies)
		case condition.Refuse:
			taken = false
			if r != nil {
				replies = append(replies, reply{reader: *r, err: o.Err})
			}
		}
	}
	return s.turn(replies), taken
}

// excuse is a push of a rank that does not come, and adds nothing.
func (s *readers) excuse(rank int, superstep uint64) []reply {
	push := condition.Push(rank, superstep, 0)
	if s.inherited.waits() {
		s.inherited.excused = append(s.inherited.excused, push)
		return nil
	}
	replies, _ := s.step(push, nil, nil, nil)
	return replies
}

// change has a change of conditions be made when its iteration has come.
func (s *readers) change(c room.Change) []reply {
	s.changes.Add(c)
	s.note(c)
	if c.Pull != nil {
		s.tuned = c.At
	}
	return s.turn(nil)
}

// note notes a change for another server to make, where the value goes on there. Of those that hold the last of each kind counts.
func (s *readers) note(c room.Change) {
	s.changed = append(s.changed, c)
	var holds [2]bool
	for i := len(s.changed) - 1; i >= 0; i-- {
		if c := &s.changed[i]; c.At <= s.machine.V() {
			kind := &holds[0]
			if c.Pull != nil {
				kind = &holds[1]
			}
			if *kind {
				s.changed = slices.Delete(s.changed, i, i+1)
			}
			*kind = true
		}
	}
	s.changed = s.changed[max(0, len(s.changed)-limits.MaxChanges):]
}

// pulls is the model whose pull condition the value has, or is to have last.
func (s *readers) pulls() condition.Model {
	m := s.Model
	for _, c := range s.changed {
		if c.Pull != nil {
			m = *c.Pull
		}
	}
	return m
}

// retune sets the pull condition that a tuner has found: from the iteration on from which the tuner's model holds.
func (s *readers) retune(pull condition.PullCondition) []reply {
	s.changes.Retune(s.tuned, condition.SetPull(pull))
	return s.turn(nil)
}

// turn makes the changes whose iteration has come.
func (s *readers) turn(replies []reply) []reply {
	for {
		in, ok := s.changes.Due(s.machine.V())
		if !ok {
			return replies
		}
		replies, _ = s.step(in, nil, nil, replies)
	}
}

// answer takes those who are due out of the readers; their replies are due.
func (s *readers) answer(due func(*reader) bool, replies []reply) []reply {
	kept := s.waiting[:0]
	for i := range s.waiting {
		r := &s.waiting[i]
		if !due(r) {
			kept = append(kept, *r)
			continue
		}
		waited := time.Since(r.since)
		a, err := s.read(r, s.before+s.machine.V())
		replies = append(replies, reply{reader: *r, answer: a, covers: s.covering(), waited: waited, err: err})
	}
	s.keep(kept)
	return replies
}

// remove takes readers out that are not answered.
func (s *readers) remove(which func(*reader) bool) (taken []reader) {
	kept := s.waiting[:0]
	for i := range s.waiting {
		if r := &s.waiting[i]; which(r) {
			taken = append(taken, *r)
		} else {
			kept = append(kept, *r)
		}
	}
	s.keep(kept)
	return taken
}

// live updates who takes part.
func (s *readers) live(live rankset.Set) []reply {
	if live.Len() == 0 {
		return nil
	}
	replies, _ := s.step(condition.Live(live), nil, nil, nil)
	replies = s.open(replies)
	s.deltas.forget(func(rank int) bool { return !live.Has(rank) })
	return replies
}

// tally is what has been counted.
func (s *readers) tally() room.Tally {
	n := s.past
	now := room.Tally{Tally: s.machine.Tally()}
	if s.deltas != nil {
		now.Withheld = s.deltas.withheld
	}
	n.Add(now)
	return n
}

// cancel gives the value up, and returns who waited.
func (s *readers) cancel() (dropped []reader) {
	dropped, s.over = s.waiting, true
	s.keep(nil)
	s.release()
	s.drop()
	return dropped
}

// waits reports since when the first reader waits, and for whom: of declarations the name's home knows it.
func (s *readers) waits() (since time.Time, missing rankset.Set, ok bool) {
	for i := range s.waiting {
		if r := &s.waiting[i]; !r.has(wire.FlagDeclare) && (!ok || r.since.Before(since)) {
			since, ok = r.since, true
		}
	}
	if !ok {
		return since, missing, false
	}
	return since, s.missing(), true
}

// missing are the ranks for which readers wait.
func (s *readers) missing() rankset.Set {
	if s.inherited.waits() {
		return s.inherited.handed.Missing(s.Lost())
	}
	return s.machine.Missing(s.machine.V())
}

// stalled finds the readers of whom a warning is due, and takes those out that have waited too long.
func (s *readers) stalled(now time.Time) (missing rankset.Set, slow, ended []reader) {
	warning, shutdown := s.Round.StallWarning, s.Round.StallShutdown
	ended = s.remove(func(r *reader) bool {
		switch waited := now.Sub(r.since); {
		case r.has(wire.FlagDeclare):
		case shutdown > 0 && waited >= shutdown:
			return true
		case warning > 0 && waited >= warning && now.Sub(r.warned) >= warning:
			r.warned = now
			slow = append(slow, *r)
		}
		return false
	})
	return s.missing(), slow, ended
}
