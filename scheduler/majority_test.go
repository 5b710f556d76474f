package scheduler

import (
	"cmp"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport/wire"
)

var partings = flag.Int("partings", 3000, "how many seeds the tests of parted networks run")

// A parting is a network that falls into sides, with a scheduler on each: the old one, which rank 0 runs, and others that begin.
type parting struct {
	ranks   int
	random  *rand.Rand
	side    []int           // by rank: where it is at the end; 0 is that of the old scheduler
	dead    []bool          // by rank: its process has ended
	ends    []time.Duration // by rank: when its process ends; that of rank 0 has the old scheduler
	events  []partingEvent
	told    [3]bool            // by side: its workers were told that the job cannot go on there
	cut     [][3]time.Duration // by rank and side: from when on nothing passes between it and the scheduler there
	known   []wire.Known       // by rank: what it knows of the round
	machine [3]*Machine        // by side
}

type partingEvent struct {
	at    time.Duration
	which int // machine
	input Input
	known bool // the rank on that line sends what it knows by then
}

// never is after the end of each test.
const never = time.Hour

// TestOnlyOneSideOfAPartedNetworkDecides: lines break one after the other, nodes accuse those on the other side, some have ended, in any order. One side goes on
// without the running workers of the other at most: if it has most of all, or half of them with the lowest, or if the others have ended. That processes of the other side have ended
// later, with the job, says nothing.
func TestOnlyOneSideOfAPartedNetworkDecides(t *testing.T) {
	for seed := range uint64(*partings) {
		p := newJob(rand.New(rand.NewPCG(seed, 95)))
		p.part()
		p.run()
		lives := func(side int) (n int) {
			for rank := range p.ranks {
				n += number01(p.side[rank] == side && !p.dead[rank])
			}
			return n
		}
		old, other := lives(0), lives(1) // rank 0 is on the first, and lives
		if got := [2]bool{p.goesOn(0), p.goesOn(1)}; got != [2]bool{2*old >= p.ranks || other == 0, 2*other > p.ranks} {
			t.Fatalf("seed %d: sides %v, dead %v: they go on: %v", seed, p.side, p.dead, got)
		}
	}
}

// TestANetworkThatFallsApartPieceByPieceGoesOnOnOneSideAtMost: nodes are cut off one after the other, some before the loss of others is decided and some after.
func TestANetworkThatFallsApartPieceByPieceGoesOnOnOneSideAtMost(t *testing.T) {
	oneSideAtMost(t, 96, 2, (*parting).fallApart)
}

// TestOneSideAtMostGoesOnWhereTheSchedulerIsLostToo: while the network falls apart, the process of the scheduler ends, or is cut off itself. Who is left looks for
// another scheduler, and may be cut off from that one too. Any process may end at any time, and any scheduler hear of that.
func TestOneSideAtMostGoesOnWhereTheSchedulerIsLostToo(t *testing.T) {
	oneSideAtMost(t, 97, 4, (*parting).fallApartWithoutScheduler)
}

// oneSideAtMost runs jobs of which one in so many goes on at least.
func oneSideAtMost(t *testing.T, stream uint64, oneIn int, fall func(*parting)) {
	goOn := 0
	for seed := range uint64(*partings) {
		p := newJob(rand.New(rand.NewPCG(seed, stream)))
		fall(p)
		p.run()
		var on []int
		for side := range p.machine {
			if p.goesOn(side) {
				on = append(on, side)
			}
		}
		if len(on) > 1 {
			t.Fatalf("seed %d: sides %v, dead %v, cut %v: sides %v go on", seed, p.side, p.dead, p.cut, on)
		}
		goOn += len(on)
	}
	t.Logf("%d of %d jobs go on", goOn, *partings)
	if oneIn*goOn < *partings {
		t.Errorf("only %d of %d jobs go on", goOn, *partings)
	}
}

// goesOn reports whether a side goes on without the others.
func (p *parting) goesOn(side int) bool {
	m, here := p.machine[side], false
	if len(m.rounds) == 0 {
		return false
	}
	for rank, w := range m.rounds[0].workers {
		switch {
		case p.dead[rank]:
		case p.side[rank] == side:
			here = here || w.state == present
		case w.state != lost: // it waits for one on another side
			return false
		}
	}
	return here && !p.told[side]
}

func number01(b bool) int {
	if b {
		return 1
	}
	return 0
}

// newJob is a job under the old scheduler, in which nobody has been cut off yet. Some of its ranks will be on side 1.
func newJob(random *rand.Rand) *parting {
	ranks := 2 + random.IntN(6)
	p := &parting{ranks: ranks, random: random, dead: make([]bool, ranks), known: make([]wire.Known, ranks)}
	for side := range p.machine {
		p.machine[side] = NewMachine(Settings{FirstRound: 1, LostAfter: 10 * time.Second})
	}
	for rank := range p.ranks {
		p.side, p.cut = append(p.side, min(rank, random.IntN(2))), append(p.cut, [3]time.Duration{never, never, never})
		p.ends = append(p.ends, never)
		p.step(0, Input{Line: Line(rank + 1), Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
		p.step(0, Input{Line: Line(rank + 1), Message: &wire.Control{ID: 1, Register: &wire.Register{Workers: p.ranks, Elastic: true, Node: p.node(rank)}}})
	}
	return p
}

// within is any time within a duration.
func (p *parting) within(d time.Duration) time.Duration {
	return time.Duration(p.random.Int64N(int64(d)))
}

// fallApart cuts the nodes of side 1 off at any time within 12 s. Each is noticed after the silence, and comes to the new scheduler.
func (p *parting) fallApart() {
	for rank, side := range p.side {
		if side == 0 {
			continue
		}
		p.cut[rank][0] = p.within(12 * time.Second)
		p.moves(rank, 0, 1)
		for other := range p.ranks {
			if p.side[other] == 0 && p.random.IntN(3) > 0 {
				p.misses(other, rank, 0, p.cut[rank][0]+silence+p.within(2*time.Second))
				p.misses(rank, other, 1, p.cut[rank][0]+silence+6*time.Second+p.within(2*time.Second))
			}
		}
	}
}

// silence is how long after a cut a line ends.
const silence = 7 * time.Second

// moves has a rank that is cut off from the scheduler of one side come to that of another, when it is noticed.
func (p *parting) moves(rank, from, to int) (comes time.Duration) {
	noticed := p.cut[rank][from] + silence
	p.add(noticed+p.within(time.Second), from, Input{Line: Line(rank + 1), Closed: "silent", Silent: true})
	comes = noticed + p.within(6*time.Second)
	p.comes(comes, rank, to, fmt.Sprintf("h%d:1", max(0, slices.Index(p.side, from))))
	return comes
}

// misses has a rank report that it has lost another one.
func (p *parting) misses(rank, other, which int, at time.Duration) {
	lost := &wire.Lost{Role: wire.RoleWorker, Rank: other, Why: "silent", Silent: at < p.ends[other] && !p.dead[other]}
	p.add(at, which, Input{Line: Line(rank + 1), Message: &wire.Control{Lost: lost}})
}

// fallApartWithoutScheduler has the process of rank 0 end, or be cut off with the ranks of side 0. The others come to a scheduler on side 1 or 2, some after they were on the
// other one.
func (p *parting) fallApartWithoutScheduler() {
	ends := p.random.IntN(2) == 0
	fall := p.within(15 * time.Second)
	if ends {
		p.end(0, fall)
	}
	for rank := 1; rank < p.ranks; rank++ {
		if p.random.IntN(4) == 0 {
			p.end(rank, p.within(40*time.Second))
		}
		if p.side[rank] == 0 && !ends && p.random.IntN(2) == 0 {
			continue
		}
		p.side[rank] = 1 + p.random.IntN(2)
		first := 1 + p.random.IntN(2)
		var comes time.Duration
		at := p.within(20 * time.Second)
		silent := !ends || at < fall
		if !silent {
			p.cut[rank][0] = fall
			comes = fall + p.within(4*time.Second)
			p.comes(comes, rank, first, "")
		} else {
			p.cut[rank][0] = at
			comes = p.moves(rank, 0, first)
		}
		if final := p.side[rank]; first != final {
			p.cut[rank][first] = comes + p.within(15*time.Second)
			comes = p.moves(rank, first, final)
			if silent {
				p.misses(rank, 0, final, comes)
			}
		}
		for other := range p.ranks {
			if p.side[other] == p.side[rank] {
				continue
			}
			p.misses(rank, other, first, p.cut[rank][0]+p.within(2*silence))
			p.misses(rank, other, p.side[rank], comes+p.within(2*silence))
			p.misses(other, rank, p.side[other], comes+p.within(2*silence))
		}
	}
}

// end has the process of a rank end, and some schedulers hear of that.
func (p *parting) end(rank int, at time.Duration) {
	p.ends[rank], p.dead[rank] = at, true
	for which := range p.machine {
		if p.random.IntN(2) == 0 {
			p.add(at+p.within(time.Second), which, Input{Line: Line(rank + 1), Closed: "it ended"})
		}
		if p.random.IntN(2) == 0 {
			for range 20 {
				p.add(at+p.within(20*time.Second), which, Input{Ended: uint64(rank + 1)})
			}
		}
	}
}

// comes has a rank come to a new scheduler, with what it knows then.
func (p *parting) comes(at time.Duration, rank, which int, silent string) {
	line := Line(rank + 1)
	p.add(at, which, Input{Line: line, Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
	p.add(at, which, Input{Line: line, Message: &wire.Control{ID: 1, Register: &wire.Register{Workers: p.ranks, Elastic: true, Node: p.node(rank), Known: &wire.Known{Silent: silent}}}})
	p.events[len(p.events)-1].known = true
}

// part cuts side 1 off at once. Processes of both sides have ended at that time.
func (p *parting) part() {
	for rank := range p.ranks {
		if rank > 0 && p.random.IntN(6) == 0 { // rank 0 has the old scheduler
			p.dead[rank], p.ends[rank] = true, 0
		}
		if p.side[rank] == 1 {
			p.cut[rank][0] = 0
		}
	}
	for rank := range p.ranks {
		line := Line(rank + 1)
		if p.dead[rank] {
			closed := p.within(time.Second)
			p.add(closed, 0, Input{Line: line, Closed: "it ended"})
			p.add(closed+p.within(5*time.Second), 0, Input{Ended: uint64(rank + 1)}) // who has lost the line asks
			p.add(8*time.Second+p.within(5*time.Second), 1, Input{Ended: uint64(rank + 1)})
			continue
		}
		if p.side[rank] == 0 {
			p.accuse(rank, 0)
			continue
		}
		ends := p.within(1200 * time.Millisecond) // four sweeps of the watch: an eighth of the timeout
		p.add(ends, 0, Input{Line: line, Closed: "silent", Silent: true})
		p.add(ends+p.within(30*time.Second), 0, Input{Ended: uint64(rank + 1)})
		begin := p.within(6 * time.Second)
		p.comes(begin, rank, 1, []string{"", "h0:1"}[p.random.IntN(2)])
		p.accuse(rank, begin)
	}
}

func (p *parting) node(rank int) wire.Node {
	at := fmt.Sprint("h", rank, ":1")
	return wire.Node{Role: wire.RoleWorker, Rank: rank, Session: uint64(rank + 1), Standby: at, Addresses: address.List{{Kind: "tcp", At: at}}}
}

func (p *parting) add(at time.Duration, which int, in Input) {
	p.events = append(p.events, partingEvent{at: at, which: which, input: in})
}

// accuse has a rank report some of those on the other side, which it has lost.
func (p *parting) accuse(rank int, from time.Duration) {
	for other := range p.ranks {
		if p.side[other] != p.side[rank] && p.random.IntN(3) > 0 {
			at := from + p.within(4*time.Second)
			p.misses(rank, other, p.side[rank], at)
			if !p.dead[other] {
				p.add(at+p.within(30*time.Second), p.side[rank], Input{Ended: uint64(other + 1)})
			}
		}
	}
}

// run plays the events, and a minute after them.
func (p *parting) run() {
	for side := range p.machine {
		p.add(90*time.Second, side, Input{})
	}
	slices.SortStableFunc(p.events, func(a, b partingEvent) int { return cmp.Compare(a.at, b.at) })
	for len(p.events) > 0 {
		e := p.events[0]
		next := partingEvent{at: e.at + 1}
		for which, m := range p.machine {
			if at, ok := m.Deadline(); ok && at < next.at && p.runs(which, at) {
				next = partingEvent{at: at, which: which}
			}
		}
		if next.at <= e.at {
			p.step(next.which, Input{Now: next.at})
			continue
		}
		p.events = p.events[1:]
		if !p.runs(e.which, e.at) {
			continue
		}
		if e.input.Message != nil && !p.reaches(int(e.input.Line)-1, e.which, e.at) {
			continue
		}
		if e.input.Now = e.at; e.known {
			known := e.input.Message.Register.Known
			silent := known.Silent
			*known = p.known[e.input.Line-1]
			known.Silent = silent
		}
		p.step(e.which, e.input)
	}
}

// runs reports whether a scheduler runs at a time.
func (p *parting) runs(which int, at time.Duration) bool { return which > 0 || at < p.ends[0] }

// reaches reports whether a rank and a scheduler reach each other.
func (p *parting) reaches(rank, which int, at time.Duration) bool {
	return at < p.cut[rank][which] && at < p.ends[rank]
}

// step has a machine take an input. Ranks that it reaches hear what it says, and answer its questions.
func (p *parting) step(which int, in Input) {
	for _, o := range p.machine[which].Step(in) {
		m, rank := o.Message, int(o.Line)-1
		if o.Probe != 0 {
			p.probed(which, in.Now, o.Probe)
		}
		if m == nil || !p.reaches(rank, which, in.Now) {
			continue
		}
		switch {
		case m.Roster != nil:
			p.known[rank].Roster = *m.Roster
		case m.Votes != nil:
			p.known[rank].Votes = *m.Votes
		case m.Lost != nil && m.Lost.Rank != rank:
			p.told[which] = true
		case m.Lost != nil:
			p.dead[rank], p.ends[rank] = true, min(p.ends[rank], in.Now+2*time.Millisecond)
			p.answers(which, in.Now, o.Line, &wire.Control{Bye: true})
		case m.Progress != nil:
			p.answers(which, in.Now, o.Line, &wire.Control{Progress: m.Progress})
		}
	}
}

// probed has a scheduler hear soon what the host of a process says, if it reaches that.
func (p *parting) probed(which int, now time.Duration, session uint64) {
	switch rank := int(session) - 1; {
	case p.reaches(rank, which, now):
		p.soon(which, now, Input{Answered: session})
	case now < p.cut[rank][which]:
		p.soon(which, now, Input{Ended: session})
	}
}

// answers has a rank send a message soon.
func (p *parting) answers(which int, now time.Duration, line Line, m *wire.Control) {
	p.soon(which, now, Input{Line: line, Message: m})
}

func (p *parting) soon(which int, now time.Duration, in Input) {
	e := partingEvent{at: now + time.Millisecond, which: which, input: in}
	i, _ := slices.BinarySearchFunc(p.events, e, func(a, b partingEvent) int { return cmp.Compare(a.at, b.at) })
	p.events = slices.Insert(p.events, i, e)
}
