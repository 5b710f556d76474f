package condition

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/paceline/paceline/internal/rankset"
)

// Bounds of what a ledger can book; sets of ranks are bit masks.
const (
	maxRanks      = 8
	maxIterations = 256
)

// ledger is the plain account of what a machine must do, in sets that are masks:
//
//   - V rises by one with each advance, and only when the push condition holds; contributors are those
//     whose pushes were admitted.
//   - An iteration that every live rank has pushed is closed.
//   - A push of a live rank for an open iteration is admitted once. Every other is told to be dropped
//     or doubled, and counted.
//   - A pull is answered at once exactly when the pull condition holds. One that waits is answered
//     once: when V passes what it is filed under, which is its progress (lazy) or the V of its arrival
//     (soft barrier), or when the membership or a condition changes and the condition holds.
type ledger struct {
	m        *Machine
	dataflow Dataflow
	parking  Parking
	when     PullCondition
	closes   PushCondition

	alive     uint8
	v         uint64
	admitted  [maxIterations]uint8
	since     [maxRanks]uint64 // the iteration at which a rank came
	pushed    [maxRanks]uint64 // its newest push, plus one
	told      [maxRanks]float32
	waiting   []parkedPull
	staleness uint64 // greatest lead that any pull condition has allowed so far
	tally     Tally

	out   []Output
	count func(uint64) int
}

// unbounded is the staleness of conditions that bound no lead.
const unbounded = 1 << 32

func check(ok bool, format string, values ...any) {
	if !ok {
		panic(fmt.Errorf(format, values...))
	}
}

func all(n int) uint8 { return uint8(1<<n - 1) }

func (l *ledger) start(c Config, n int) {
	m, err := New(c)
	check(err == nil, "new machine of %s: %v", c.Model.Name, err)
	*l = ledger{m: m, dataflow: c.Dataflow, parking: c.Parking, when: c.Model.Pull, closes: c.Model.Push,
		alive: all(n), staleness: staleness(c.Model.Pull), waiting: l.waiting[:0], out: l.out}
	l.count = func(i uint64) int { return bits.OnesCount8(l.admitted[i] & l.alive) }
}

func staleness(c PullCondition) uint64 {
	switch c := c.(type) {
	case Closed:
		return 0
	case Within:
		return c.S
	case Sometimes:
		if c.P == Constant(1) {
			return c.S
		}
	}
	return unbounded
}

func (l *ledger) push(rank int, progress uint64, significance float32) {
	bit := uint8(1) << rank
	twice := l.admitted[progress]&bit != 0
	want := Admit
	switch {
	case l.alive&bit == 0:
		want = Drop
	case progress < l.v && !twice:
		want = Drop
	case twice && progress < l.v && progress < l.since[rank]:
		want = Drop // of its life before
	case twice:
		want = Duplicate
	}
	back := progress < l.pushed[rank] && (!twice || progress < l.since[rank])
	if want == Drop && l.alive&bit != 0 && progress >= max(l.since[rank], l.pushed[rank]) { // so far it has come, all the same
		l.pushed[rank], l.told[rank] = progress+1, significance
	}
	if want == Admit {
		l.admitted[progress] |= bit
		l.pushed[rank] = max(l.pushed[rank], progress+1)
		l.told[rank] = significance
	}
	out := l.step(Push(rank, progress, significance))
	got := out[0]
	if want != Admit && got.Kind == Duplicate && back {
		want = Duplicate // it goes back behind its newest push, which no worker does: either name will do
	}
	check(got.Kind == want && got.Rank == rank && got.Progress == progress, "push of rank %d iteration %d: %v, want %v", rank, progress, got, want)
	l.tally.add(got.Kind)
	l.book(out[1:], false)
}

func (l *ledger) pull(rank int, progress uint64) {
	want := Park
	switch {
	case l.waits(rank, progress):
		want = Duplicate
	case l.when.Holds(l.view(rank, progress)):
		want = Answer
	}
	if want == Park {
		filed := l.v
		if l.parking == Lazy {
			filed = max(progress, l.v)
		}
		l.waiting = append(l.waiting, parkedPull{rank, progress, filed})
	}
	out := l.step(Pull(rank, progress))
	check(len(out) == 1 && out[0].Kind == want && out[0].Rank == rank && out[0].Progress == progress,
		"pull of rank %d iteration %d under %q with V at %d: %v, want %v", rank, progress, l.when, l.v, out, want)
	check(want != Answer || l.dataflow == Accumulate || progress < l.v, "an aggregate key answers iteration %d with V at %d", progress, l.v)
	l.tally.add(want)
	l.book(nil, false)
}

func (l *ledger) live(alive uint8) {
	var set rankset.Set
	for r := range maxRanks {
		if alive&(1<<r) == 0 {
			continue
		}
		set.Add(r)
		if l.alive&(1<<r) == 0 {
			l.since[r] = l.v
			l.pushed[r] = max(l.pushed[r], l.v)
		}
	}
	l.alive = alive
	l.book(l.step(Live(set)), true)
}

func (l *ledger) setPull(c PullCondition) {
	refused := l.dataflow == Aggregate && c.Ahead()
	if !refused {
		l.when, l.staleness = c, max(l.staleness, staleness(c))
	}
	l.set(l.step(SetPull(c)), refused)
}

func (l *ledger) setPush(c PushCondition) {
	enough, ok := c.(Enough)
	refused := ok && enough.Nt > bits.OnesCount8(l.alive)
	if !refused {
		l.closes = c
	}
	l.set(l.step(SetPush(c)), refused)
}

func (l *ledger) set(out []Output, refused bool) {
	if refused {
		check(len(out) == 1 && out[0].Kind == Refuse && out[0].Err != nil, "a condition that does not fit: %v", out)
		return
	}
	l.book(out, true)
}

func (l *ledger) step(in Input) []Output {
	l.out = l.m.Step(in, l.out[:0])
	return l.out
}

// book books the advances and answers that follow an input, and sees that none is missing.
func (l *ledger) book(out []Output, reexamined bool) {
	for _, o := range out {
		switch o.Kind {
		case Advance:
			l.nothingDue(false)
			check(o.Progress == l.v, "%v with V at %d", o, l.v)
			check(l.closes.Holds(l.view(-1, l.v)), "%v against %q", o, l.closes)
			check(mask(o.Contributors) == l.admitted[l.v], "%v: admitted were %08b", o, l.admitted[l.v])
			l.v++
		case Answer:
			l.answer(o, reexamined)
		default:
			check(false, "unexpected %v", o)
		}
	}
	l.nothingDue(reexamined)
	check(l.admitted[l.v] == 0 || !l.closes.Holds(l.view(-1, l.v)), "iteration %d is open though %q holds", l.v, l.closes)
	check(l.alive == 0 || l.admitted[l.v]&l.alive != l.alive, "iteration %d is open though every live rank has pushed it", l.v)
	check(l.m.Tally() == l.tally, "counted %+v, the ledger %+v", l.m.Tally(), l.tally)
	check(l.m.V() == l.v && l.m.Parked() == len(l.waiting), "V %d, parked %d; the ledger says %d and %d", l.m.V(), l.m.Parked(), l.v, len(l.waiting))
}

func (l *ledger) answer(o Output, reexamined bool) {
	for i, p := range l.waiting {
		if p.rank == o.Rank && p.progress == o.Progress {
			check(l.due(p, reexamined), "%v with V at %d, filed under %d, against %q", o, l.v, p.filed, l.when)
			l.waiting = append(l.waiting[:i], l.waiting[i+1:]...)
			return
		}
	}
	check(false, "%v, but nobody waits for that", o)
}

func (l *ledger) due(p parkedPull, reexamined bool) bool {
	return p.filed < l.v || reexamined && l.when.Holds(l.view(p.rank, p.progress))
}

func (l *ledger) nothingDue(reexamined bool) {
	for _, p := range l.waiting {
		check(!l.due(p, reexamined), "the pull of rank %d iteration %d still waits with V at %d under %q", p.rank, p.progress, l.v, l.when)
	}
}

func (l *ledger) waits(rank int, progress uint64) bool {
	for _, p := range l.waiting {
		if p.rank == rank && p.progress == progress {
			return true
		}
	}
	return false
}

func (l *ledger) lastWaiting() (last uint64) {
	for _, p := range l.waiting {
		last = max(last, p.progress)
	}
	return last
}

func (l *ledger) view(rank int, progress uint64) View {
	v := View{Rank: rank, Progress: progress, V: l.v, N: bits.OnesCount8(l.alive), Slowest: math.MaxUint64, count: l.count}
	for r := range maxRanks {
		if l.alive&(1<<r) != 0 {
			v.Fastest, v.Slowest = max(v.Fastest, l.pushed[r]), min(v.Slowest, l.pushed[r])
		}
	}
	if v.N == 0 {
		v.Slowest = 0
	}
	if rank >= 0 {
		v.Significance = l.told[rank]
	}
	return v
}

func mask(set rankset.Set) (m uint8) {
	for r := range maxRanks {
		if set.Has(r) {
			m |= 1 << r
		}
	}
	return m
}
