package scheduler

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/transport/wire"
)

// sets are the process sets of a round. Adding and removing one is collective: every worker makes the
// same calls in the same order, so a call is known by its position among its worker's calls, and is
// answered when all workers have made it. A worker may also ask for a set alone: the ranks say which it is.
type sets struct {
	byID     map[uint32][]int
	found    map[uint32]bool // those that a worker has asked for alone
	next     uint32
	open     map[uint64]*call
	done     map[uint64]wire.Control // answers of the last calls, for workers that ask again or later
	answered uint64                  // calls before this position were answered before a restart
}

// call is one collective call, while some workers have not made it.
type call struct {
	first wire.Control
	asked map[int]waiting // by rank
}

type waiting struct {
	request
	since, until time.Duration
}

// keptCalls is how many answers a round remembers.
const keptCalls = 64

func newSets(workers int) sets {
	return sets{
		byID: map[uint32][]int{0: rankset.Range(workers).Ranks()}, found: map[uint32]bool{}, next: 1,
		open: map[uint64]*call{}, done: map[uint64]wire.Control{},
	}
}

// with is the number of the set of the given ranks.
func (s *sets) with(ranks []int) (id uint32, ok bool) {
	for _, id := range slices.Sorted(maps.Keys(s.byID)) {
		if slices.Equal(s.byID[id], ranks) {
			return id, true
		}
	}
	return 0, false
}

// call handles one worker's share of a collective call.
func (m *Machine) call(l *line, c *wire.Control) {
	r, at := l.peer.round, c.Position
	if done, ok := r.sets.done[at]; ok {
		m.answer(l, c.ID, &done)
		return
	}
	if at < r.sets.answered {
		m.answer(l, c.ID, r.sets.recall(c))
		return
	}
	k := r.sets.open[at]
	if k == nil {
		if len(r.sets.open) >= keptCalls {
			m.refuse(l, c.ID, fmt.Sprintf("%d calls on process sets wait for other ranks already", keptCalls))
			return
		}
		k = &call{first: *c, asked: map[int]waiting{}}
		r.sets.open[at] = k
	}
	k.asked[l.peer.Rank] = waiting{request{l, c}, m.now, m.deadline(c)}
	switch gone := append(r.saidGoodbye(), r.in(lost)...); {
	case !sameCall(&k.first, c):
		m.finish(r, at, refused("ranks disagree: %s", k.disagreement()))
	case len(gone) > 0 && !r.epoch.Elastic:
		slices.Sort(gone)
		m.finish(r, at, missed("a call on process sets takes all ranks, and %s left the job or was lost", ranksOf(gone)))
	default:
		m.decide(r, at)
	}
}

// decide carries out a call that all have made.
func (m *Machine) decide(r *round, at uint64) {
	k := r.sets.open[at]
	if len(r.awaited(k)) > 0 {
		return
	}
	answer := r.apply(&k.first)
	if k.first.RemoveID != 0 && answer.Error == "" {
		m.removed(r, k.first.RemoveID)
	}
	m.finish(r, at, answer)
}

// removed tells the dedicated servers of a set that is removed; those in workers learn it from their workers. One whose line
// is broken keeps the set's tensors until the round ends.
func (m *Machine) removed(r *round, id uint32) {
	for _, p := range m.serversOf(r) {
		m.send(p.line, &wire.Control{Removed: &wire.RemovedSet{Round: r.epoch.Round, ID: id}})
	}
}

// finish answers a call to all workers that have made it and stores the answer for the others.
func (m *Machine) finish(r *round, at uint64, answer wire.Control) {
	k := r.sets.open[at]
	delete(r.sets.open, at)
	r.sets.done[at] = answer
	delete(r.sets.done, at-keptCalls)
	for _, rank := range slices.Sorted(maps.Keys(k.asked)) {
		if q := k.asked[rank]; m.lines[q.line.id] == q.line {
			a := answer
			m.answer(q.line, q.msg.ID, &a)
		}
	}
}

// failCalls ends the calls that a rank can no longer make; an elastic round does without it.
func (m *Machine) failCalls(r *round, rank int, why string) {
	for _, at := range slices.Sorted(maps.Keys(r.sets.open)) {
		if r.epoch.Elastic {
			m.decide(r, at)
		} else if _, ok := r.sets.open[at].asked[rank]; !ok {
			m.finish(r, at, missed("a call on process sets takes all ranks, and %s", why))
		}
	}
}

// expireCalls ends the calls whose deadline has passed. They fail for later callers too: all ranks get
// the same answer.
func (m *Machine) expireCalls(r *round) {
	for _, at := range slices.Sorted(maps.Keys(r.sets.open)) {
		k := r.sets.open[at]
		for _, rank := range slices.Sorted(maps.Keys(k.asked)) {
			if q := k.asked[rank]; m.due(q.until) {
				m.finish(r, at, missed("rank %d waited %s for %s to %s too", rank, seconds(m.now-q.since), ranksOf(r.awaited(k)), ask(q.msg)))
				break
			}
		}
	}
}

// apply carries out a call that all workers have made.
func (r *round) apply(c *wire.Control) wire.Control {
	s := &r.sets
	if c.RemoveID != 0 {
		ranks, ok := s.byID[c.RemoveID]
		if !ok {
			return refused("there is no process set %d", c.RemoveID)
		}
		delete(s.byID, c.RemoveID)
		delete(s.found, c.RemoveID)
		r.tensors.dropSet(c.RemoveID)
		return wire.Control{Set: &wire.ProcessSet{ID: c.RemoveID, Ranks: ranks}}
	}
	return r.add(c.AddSet)
}

// find answers a worker that asks for a set alone.
func (r *round) find(ranks []int) wire.Control {
	answer := r.add(ranks)
	if answer.Set != nil && answer.Set.ID != 0 {
		answer.Set.Found = true
		r.sets.found[answer.Set.ID] = true
	}
	return answer
}

// add gives the set of the ranks, and makes it if there is none.
func (r *round) add(wanted []int) wire.Control {
	s, ranks := &r.sets, slices.Sorted(slices.Values(wanted))
	for i, rank := range ranks {
		if rank < 0 || rank >= len(r.workers) {
			return refused("%s", outOfRange(rank, len(r.workers)))
		}
		if r.epoch.Workers[rank].State == membership.Gone {
			return refused("rank %d was lost; name the ranks that are left", rank)
		}
		if i > 0 && rank == ranks[i-1] {
			return refused("rank %d is in it twice", rank)
		}
	}
	id, ok := s.with(ranks)
	if !ok {
		if len(s.byID) >= limits.MaxProcessSets {
			return refused("the job has %d sets, which is the limit; remove some", len(s.byID))
		}
		if s.next > limits.MaxNumber {
			return refused("the job has used up the numbers of process sets, %d", limits.MaxNumber)
		}
		id = s.next
		s.next++
		s.byID[id] = ranks
	}
	return wire.Control{Set: &wire.ProcessSet{ID: id, Ranks: ranks}}
}

// recall repeats the answer of a call from before the restart of the scheduler, as far as the sets that the
// workers know show it.
func (s *sets) recall(c *wire.Control) *wire.Control {
	ranks := slices.Sorted(slices.Values(c.AddSet))
	id, ok := s.with(ranks)
	_, there := s.byID[c.RemoveID]
	switch {
	case c.RemoveID == 0 && ok:
		return &wire.Control{Set: &wire.ProcessSet{ID: id, Ranks: ranks}}
	case c.RemoveID != 0 && !there:
		return &wire.Control{Set: &wire.ProcessSet{ID: c.RemoveID}}
	}
	return &wire.Control{Error: "the ranks did not agree on this process set, or it was refused; a restart of the scheduler lost the reason"}
}

// learn adds the sets that a worker knows. The worker with more answered calls has precedence.
func (s *sets) learn(known *wire.Known, workers int) {
	if known.SetCalls > s.answered {
		maps.DeleteFunc(s.byID, func(id uint32, _ []int) bool { return id != 0 && !s.found[id] })
		s.answered = known.SetCalls
	}
	for _, p := range known.Sets {
		n := len(p.Ranks)
		if p.ID == 0 || p.ID > limits.MaxNumber || n == 0 || !slices.IsSorted(p.Ranks) || p.Ranks[0] < 0 || p.Ranks[n-1] >= workers {
			continue
		}
		if p.Found {
			s.found[p.ID] = true
		}
		if p.Found || known.SetCalls == s.answered {
			s.byID[p.ID] = p.Ranks
		}
		s.next = max(s.next, p.ID+1)
	}
	if known.LastSet <= limits.MaxNumber { // else a bad message
		s.next = max(s.next, known.LastSet+1)
	}
}

// sameCall reports whether two workers ask for the same. The order of ranks does not matter.
func sameCall(a, b *wire.Control) bool {
	return a.RemoveID == b.RemoveID &&
		slices.Equal(slices.Sorted(slices.Values(a.AddSet)), slices.Sorted(slices.Values(b.AddSet)))
}

// disagreement names the two ranks that ask for different things.
func (k *call) disagreement() string {
	ranks := slices.Sorted(maps.Keys(k.asked))
	first := k.asked[ranks[0]].msg
	for _, rank := range ranks {
		if c := k.asked[rank].msg; !sameCall(first, c) {
			return fmt.Sprintf("rank %d asks to %s, rank %d asks to %s", ranks[0], ask(first), rank, ask(c))
		}
	}
	return ""
}

func ask(c *wire.Control) string {
	if c.RemoveID != 0 {
		return fmt.Sprintf("remove set %d", c.RemoveID)
	}
	return fmt.Sprintf("add [%s]", rankset.Join(c.AddSet))
}

func refused(format string, args ...any) wire.Control {
	return wire.Control{Error: fmt.Sprintf(format, args...)}
}

// missed is the answer to a call for which a rank does not come.
func missed(format string, args ...any) wire.Control {
	c := refused(format, args...)
	c.Missed = true
	return c
}
