package condition

import (
	"fmt"
	"slices"

	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
)

// MaxLead bounds how many iterations a push may lie ahead of the open one, and so the memory of a
// machine: MaxLead sets of ranks.
const MaxLead = limits.MaxLead

// Config is the initial state of a key.
type Config struct {
	Live     rankset.Set // ranks that take part; cloned
	Model    Model
	Parking  Parking
	Dataflow Dataflow
	Start    uint64 // the iteration that is open; those before it were closed elsewhere
}

// Machine is the state of one key. It is not safe for concurrent use.
//
// Invariants, checked after every Step in builds with the tag "invariants":
//
//  1. V never falls, and rises by one with each Advance.
//  2. open[k] belongs to iteration V+k, and its count is the number of its ranks that are live.
//  3. A push of one rank and iteration is admitted at most once, and only while the iteration is open.
//  4. Every parked pull is filed under an iteration that is not closed yet, and leaves by exactly one
//     Answer. Under lazy parking it is filed under its own progress or, if that is closed, under V.
//  5. Between two Steps the push condition does not hold for V, or nobody has pushed V.
//  6. Every live rank's number of pushed iterations lies between slowest and fastest, both are
//     reached, and atSlowest ranks are at slowest.
type Machine struct {
	pull     PullCondition
	push     PushCondition
	parking  Parking
	dataflow Dataflow

	live rankset.Set
	n    int // live.Len()

	v      uint64
	open   []arrivals    // of iterations V, V+1, … as far as anybody has pushed
	spent  []rankset.Set // lent by this Step's Advances; free again at the next
	free   []rankset.Set // empty sets for reuse
	parked []parkedPull

	ranks            []rankState // by rank
	fastest, slowest uint64
	atSlowest        int

	tally Tally
	count func(uint64) int // m.liveCount, bound once so that a View costs no allocation
}

// arrivals are the pushes of one open iteration.
type arrivals struct {
	from  rankset.Set // ranks that have pushed it, lost ones too
	count int         // how many of them are live
}

// parkedPull is a pull that waits (a DPR of the papers).
type parkedPull struct {
	rank     int
	progress uint64
	filed    uint64 // iteration whose closing answers it
}

type rankState struct {
	since        uint64 // the iteration that was open when the rank came
	pushed       uint64 // newest iteration pushed, plus one; since before the first push
	significance float32
	parked       int32 // pulls of this rank in Machine.parked
}

// New makes the machine of one key.
func New(c Config) (*Machine, error) {
	if err := c.Model.Check(c.Dataflow); err != nil {
		return nil, err
	}
	if c.Parking == SoftBarrier && c.Dataflow == Aggregate {
		return nil, fmt.Errorf("soft-barrier parking answers pulls before their iteration is closed, which an aggregate key cannot serve: use lazy parking")
	}
	m := &Machine{pull: c.Model.Pull, push: c.Model.Push, parking: c.Parking, dataflow: c.Dataflow, v: c.Start}
	m.count = m.liveCount
	m.setLive(c.Live)
	return m, nil
}

// V is the number of closed iterations, which is also the iteration that is open.
func (m *Machine) V() uint64 { return m.v }

// Fastest is the number of iterations that the furthest live rank has pushed.
func (m *Machine) Fastest() uint64 { return m.fastest }

// Tally holds the counts of a machine since its creation.
type Tally struct {
	Admitted  uint64 // pushes to add
	Dropped   uint64 // pushes that came late, or from a rank that was not live
	Duplicate uint64 // repeated pushes and pulls
	Delayed   uint64 // pulls that had to wait: the papers' DPRs
}

// Tally returns the machine's counts.
func (m *Machine) Tally() Tally { return m.tally }

// Parked is the number of parked pulls.
func (m *Machine) Parked() int { return len(m.parked) }

// Live is the set of live ranks. It is the machine's own: Clone it to keep it.
func (m *Machine) Live() rankset.Set { return m.live }

// Missing is the set of live ranks that have not pushed an iteration, for which it waits. It is empty for a
// closed one.
func (m *Machine) Missing(progress uint64) rankset.Set {
	if progress < m.v {
		return rankset.Set{}
	}
	if a := m.at(progress); a != nil {
		return m.live.Minus(a.from)
	}
	return m.live.Clone()
}

func (t *Tally) add(k OutputKind) {
	switch k {
	case Admit:
		t.Admitted++
	case Drop:
		t.Dropped++
	case Duplicate:
		t.Duplicate++
	case Park:
		t.Delayed++
	}
}

// Step processes one input and appends its outputs to out.
func (m *Machine) Step(in Input, out []Output) []Output {
	m.reclaim()
	v, start := m.v, len(out)
	switch in.kind {
	case inPush:
		out = m.stepPush(in, out)
		m.tally.add(out[start].Kind)
	case inPull:
		out = m.stepPull(in, out)
		m.tally.add(out[start].Kind)
	case inLive:
		m.setLive(in.live)
		out = m.reexamine(out)
	case inSetPull:
		if err := checkPull(in.pull, m.dataflow); err != nil {
			return append(out, Output{Kind: Refuse, Rank: -1, Progress: m.v, Err: err})
		}
		m.pull = in.pull
		out = m.reexamine(out)
	case inSetPush:
		if err := checkPush(in.push, m.n); err != nil {
			return append(out, Output{Kind: Refuse, Rank: -1, Progress: m.v, Err: err})
		}
		m.push = in.push
		out = m.reexamine(out)
	}
	if invariant.On {
		m.check(v, out[start:])
	}
	return out
}

// stepPush is FluentPS Algorithm 1 on a push, with sets of ranks for counts and `while` for `if`.
func (m *Machine) stepPush(in Input, out []Output) []Output {
	o := Output{Rank: in.rank, Progress: in.progress}
	switch {
	case !m.live.Has(in.rank):
		o.Kind = Drop
		return append(out, o)
	case in.progress < m.v:
		if s := m.ranks[in.rank]; in.progress >= s.since && in.progress < s.pushed {
			o.Kind = Duplicate
			return append(out, o)
		}
		o.Kind = Drop
		if in.progress >= m.ranks[in.rank].since {
			m.note(in) // its progress counts, and others may have waited for it
		}
		return m.close(m.view(-1, m.v), append(out, o))
	case in.progress-m.v >= MaxLead:
		o.Kind = Refuse
		o.Err = fmt.Errorf("rank %d pushes iteration %d while iteration %d waits for ranks %v: the limit is %d ahead",
			in.rank, in.progress, m.v, m.Missing(m.v), MaxLead)
		return append(out, o)
	}
	a := m.grow(in.progress)
	if !a.from.Add(in.rank) {
		o.Kind = Duplicate
		return append(out, o)
	}
	a.count++
	m.note(in)
	o.Kind = Admit
	return m.close(m.view(in.rank, in.progress), append(out, o))
}

// stepPull is FluentPS Algorithm 1 on a pull: answer now or park.
func (m *Machine) stepPull(in Input, out []Output) []Output {
	o := Output{Kind: Answer, Rank: in.rank, Progress: in.progress}
	switch {
	case in.rank < 0 || in.rank >= limits.MaxRanks:
		o.Kind = Refuse
		o.Err = fmt.Errorf("rank %d pulls iteration %d, but ranks are below %d", in.rank, in.progress, limits.MaxRanks)
	case m.isParked(in.rank, in.progress):
		o.Kind = Duplicate
	case !m.goesOn(m.view(in.rank, in.progress)):
		o.Kind = Park
		m.park(in.rank, in.progress)
	}
	return append(out, o)
}

// close closes iterations while the push condition holds, and answers the pulls filed under each.
func (m *Machine) close(v View, out []Output) []Output {
	for len(m.open) > 0 && m.open[0].from.Len() > 0 && m.closes(v) {
		closed := m.open[0].from
		m.open = append(m.open[:0], m.open[1:]...)
		m.spent = append(m.spent, closed)
		out = append(out, Output{Kind: Advance, Rank: -1, Progress: m.v, Contributors: closed})
		m.v++
		v.V = m.v
		if v.Rank < 0 {
			v.Progress = m.v
		}
		out = m.answer(func(p parkedPull) bool { return p.filed < m.v }, out)
	}
	return out
}

// closes reports whether the open iteration is closed. Of a sum no rank is left further behind than the sums that are kept for it, whatever the condition: a
// straggler that lost one would diverge.
func (m *Machine) closes(v View) bool {
	return m.push.Holds(v) && (m.dataflow != Aggregate || v.Count(v.V) == v.N || v.V < v.Slowest+limits.MaxKept)
}

// goesOn reports whether a pull is answered. Where ranks may run ahead none comes further than a push is admitted.
func (m *Machine) goesOn(v View) bool {
	return m.pull.Holds(v) && !m.tooFar(v)
}

func (m *Machine) tooFar(v View) bool {
	return m.dataflow == Accumulate && v.Progress >= v.V+MaxLead-1
}

// reexamine evaluates the open iterations and every parked pull again, so that none waits for ever after a
// change of the membership or a condition.
func (m *Machine) reexamine(out []Output) []Output {
	out = m.close(m.view(-1, m.v), out)
	return m.answer(func(p parkedPull) bool { return m.goesOn(m.view(p.rank, p.progress)) }, out)
}

// answer answers the parked pulls that are due, in their order of arrival.
func (m *Machine) answer(due func(parkedPull) bool, out []Output) []Output {
	kept := m.parked[:0]
	for _, p := range m.parked {
		if !due(p) {
			kept = append(kept, p)
			continue
		}
		m.ranks[p.rank].parked--
		out = append(out, Output{Kind: Answer, Rank: p.rank, Progress: p.progress})
	}
	m.parked = kept
	return out
}

func (m *Machine) park(rank int, progress uint64) {
	filed := m.v
	if m.parking == Lazy && !m.tooFar(m.view(rank, progress)) {
		filed = max(progress, m.v)
	}
	m.parked = append(m.parked, parkedPull{rank, progress, filed})
	m.state(rank).parked++
}

// isParked reports whether this pull is parked already. Most ranks have none, so a search is rare.
func (m *Machine) isParked(rank int, progress uint64) bool {
	return m.state(rank).parked > 0 &&
		slices.ContainsFunc(m.parked, func(p parkedPull) bool { return p.rank == rank && p.progress == progress })
}

// view is the View of rank for progress.
func (m *Machine) view(rank int, progress uint64) View {
	v := View{Rank: rank, Progress: progress, V: m.v, N: m.n, Fastest: m.fastest, Slowest: m.slowest, count: m.count}
	if rank >= 0 {
		v.Significance = m.state(rank).significance
	}
	return v
}

func (m *Machine) liveCount(iteration uint64) int {
	if a := m.at(iteration); a != nil {
		return a.count
	}
	return 0
}

// at returns the open iteration's arrivals, nil if it is closed or no rank has pushed it or a later one.
func (m *Machine) at(iteration uint64) *arrivals {
	if iteration < m.v || iteration-m.v >= uint64(len(m.open)) {
		return nil
	}
	return &m.open[iteration-m.v]
}

// grow is at for a push: it makes room for the iteration.
func (m *Machine) grow(iteration uint64) *arrivals {
	for uint64(len(m.open)) <= iteration-m.v {
		var a arrivals
		if last := len(m.free) - 1; last >= 0 {
			a.from, m.free = m.free[last], m.free[:last]
		}
		m.open = append(m.open, a)
	}
	return m.at(iteration)
}

// reclaim recovers the sets that the last Step's Advances lent.
func (m *Machine) reclaim() {
	for i := range m.spent {
		m.spent[i].Reset()
	}
	m.free = append(m.free, m.spent...)
	m.spent = m.spent[:0]
}
