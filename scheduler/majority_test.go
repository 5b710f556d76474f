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

var partings = flag.Int("partings", 3000, "how many seeds TestOnlyOneSideOfAPartedNetworkDecides runs")

// A parting is a network that falls into two sides, with a scheduler on each: the old one, which rank 0 runs, and one that begins on the other side.
type parting struct {
	ranks   int
	here    []bool // by rank: on the old scheduler's side
	dead    []bool // its process has ended, at the same time
	events  []partingEvent
	told    [2]bool         // the workers on a side were told that the job cannot go on there
	cut     []time.Duration // by rank: from when on nothing passes between it and the old scheduler, of those on the other side
	rosters []*wire.Roster  // by rank: the latest that it knows
	machine [2]*Machine     // the old scheduler, the new one
}

type partingEvent struct {
	at    time.Duration
	which int // machine
	input Input
	known bool // the rank on that line sends what it knows by then
}

// TestOnlyOneSideOfAPartedNetworkDecides: lines break one after the other, nodes accuse those on the other side, some have ended, in any order. One side goes on
// without the running workers of the other at most; it is that with most of them, or with half of them and the lowest. That processes of the other side have ended
// later, with the job, says nothing.
func TestOnlyOneSideOfAPartedNetworkDecides(t *testing.T) {
	for seed := range uint64(*partings) {
		p := newParting(rand.New(rand.NewPCG(seed, 95)))
		p.run()
		lives := func(side bool) (n int) {
			for rank := range p.ranks {
				n += number01(p.here[rank] == side && !p.dead[rank])
			}
			return n
		}
		old, other := lives(true), lives(false)
		first := slices.Index(p.dead, false)
		oldRules := old > other || old == other && p.here[first]
		if got := [2]bool{p.goesOn(0), p.goesOn(1)}; got != [2]bool{oldRules || other == 0, other > 0 && !oldRules} {
			t.Fatalf("seed %d: here %v, dead %v: the sides go on: %v", seed, p.here, p.dead, got)
		}
	}
}

// TestANetworkThatFallsApartPieceByPieceGoesOnOnOneSideAtMost: nodes are cut off one after the other, some before the loss of others is decided and some after.
func TestANetworkThatFallsApartPieceByPieceGoesOnOnOneSideAtMost(t *testing.T) {
	goOn := 0
	for seed := range uint64(*partings) {
		random := rand.New(rand.NewPCG(seed, 96))
		p := newJob(random)
		p.fallApart(random)
		p.run()
		if slices.Contains(p.here, false) && p.goesOn(0) && p.goesOn(1) {
			t.Fatalf("seed %d: here %v, cut %v: both sides go on", seed, p.here, p.cut)
		}
		goOn += number01(p.goesOn(0)) + number01(p.goesOn(1))
	}
	if 2*goOn < *partings {
		t.Errorf("%d of %d jobs go on", goOn, *partings)
	}
}

// goesOn reports whether a side goes on without the other.
func (p *parting) goesOn(which int) bool {
	m := p.machine[which]
	if len(m.rounds) == 0 {
		return false
	}
	for rank, w := range m.rounds[0].workers {
		if !p.dead[rank] && p.here[rank] != (which == 0) && w.state != lost {
			return false // it waits for one on the other side
		}
	}
	return !p.told[which]
}

func number01(b bool) int {
	if b {
		return 1
	}
	return 0
}

// newJob is a job under the old scheduler, in which nobody has been cut off yet.
func newJob(random *rand.Rand) *parting {
	ranks := 2 + random.IntN(6)
	p := &parting{ranks: ranks, dead: make([]bool, ranks), cut: make([]time.Duration, ranks), rosters: make([]*wire.Roster, ranks)}
	settings := Settings{FirstRound: 1, LostAfter: 10 * time.Second}
	p.machine = [2]*Machine{NewMachine(settings), NewMachine(settings)}
	for rank := range p.ranks {
		p.here, p.cut[rank] = append(p.here, rank == 0 || random.IntN(2) == 0), time.Hour
		p.step(0, Input{Line: Line(rank + 1), Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
		p.step(0, Input{Line: Line(rank + 1), Message: &wire.Control{ID: 1, Register: &wire.Register{Workers: p.ranks, Elastic: true, Node: p.node(rank)}}})
	}
	return p
}

// fallApart cuts the nodes of the other side off at any time within 12 s. Each is noticed after the silence, and comes to the new scheduler.
func (p *parting) fallApart(random *rand.Rand) {
	const silence = 7 * time.Second
	within := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
	for rank := range p.ranks {
		if p.here[rank] {
			continue
		}
		p.cut[rank] = within(12 * time.Second)
		noticed := p.cut[rank] + silence
		p.add(noticed+within(time.Second), 0, Input{Line: Line(rank + 1), Closed: "silent", Silent: true})
		p.comes(noticed+within(6*time.Second), rank, []string{"", "h0:1"}[random.IntN(2)])
		for other := range p.ranks {
			if !p.here[other] || random.IntN(3) == 0 {
				continue
			}
			lost := func(r int) *wire.Control {
				return &wire.Control{Lost: &wire.Lost{Role: wire.RoleWorker, Rank: r, Why: "silent", Silent: true}}
			}
			p.add(noticed+within(2*time.Second), 0, Input{Line: Line(other + 1), Message: lost(rank)})
			p.add(noticed+6*time.Second+within(2*time.Second), 1, Input{Line: Line(rank + 1), Message: lost(other)})
		}
	}
	slices.SortStableFunc(p.events, func(a, b partingEvent) int { return int(a.at - b.at) })
}

// comes has a rank come to the new scheduler, with what it knows then.
func (p *parting) comes(at time.Duration, rank int, silent string) {
	line := Line(rank + 1)
	p.add(at, 1, Input{Line: line, Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
	p.add(at, 1, Input{Line: line, Message: &wire.Control{ID: 1, Register: &wire.Register{Workers: p.ranks, Elastic: true, Node: p.node(rank), Known: &wire.Known{Silent: silent}}}})
	p.events[len(p.events)-1].known = true
}

func newParting(random *rand.Rand) *parting {
	p := newJob(random)
	for rank := range p.ranks {
		p.dead[rank] = rank > 0 && random.IntN(6) == 0 // rank 0 has the old scheduler
		if !p.here[rank] {
			p.cut[rank] = 0
		}
	}
	within := func(d time.Duration) time.Duration { return time.Duration(random.Int64N(int64(d))) }
	for rank := range p.ranks {
		line := Line(rank + 1)
		if p.dead[rank] {
			p.add(within(time.Second), 0, Input{Line: line, Closed: "it ended"})
			p.add(within(5*time.Second), 0, Input{Ended: uint64(rank + 1)})
			p.add(8*time.Second+within(5*time.Second), 1, Input{Ended: uint64(rank + 1)})
			continue
		}
		if p.here[rank] {
			p.accuse(random, rank, 0, 0)
			continue
		}
		silence := within(1200 * time.Millisecond) // four sweeps of the watch: an eighth of the timeout
		p.add(silence, 0, Input{Line: line, Closed: "silent", Silent: true})
		p.add(silence+within(30*time.Second), 0, Input{Ended: uint64(rank + 1)})
		begin, silent := within(6*time.Second), []string{"", "h0:1"}[random.IntN(2)]
		p.comes(begin, rank, silent)
		p.accuse(random, rank, 1, begin)
	}
	slices.SortStableFunc(p.events, func(a, b partingEvent) int { return int(a.at - b.at) })
	return p
}

func (p *parting) node(rank int) wire.Node {
	at := fmt.Sprint("h", rank, ":1")
	return wire.Node{Role: wire.RoleWorker, Rank: rank, Session: uint64(rank + 1), Standby: at, Addresses: address.List{{Kind: "tcp", At: at}}}
}

func (p *parting) add(at time.Duration, which int, in Input) {
	p.events = append(p.events, partingEvent{at: at, which: which, input: in})
}

// accuse has a rank report some of those on the other side, which it has lost.
func (p *parting) accuse(random *rand.Rand, rank, which int, from time.Duration) {
	for other := range p.ranks {
		if p.here[other] != p.here[rank] && random.IntN(3) > 0 {
			at := from + time.Duration(random.Int64N(int64(4*time.Second)))
			p.add(at, which, Input{Line: Line(rank + 1), Message: &wire.Control{Lost: &wire.Lost{Role: wire.RoleWorker, Rank: other, Why: "silent", Silent: !p.dead[other]}}})
			if !p.dead[other] {
				p.add(at+time.Duration(random.Int64N(int64(30*time.Second))), which, Input{Ended: uint64(other + 1)})
			}
		}
	}
}

// run plays the events, and a minute after them.
func (p *parting) run() {
	p.events = append(p.events, partingEvent{at: time.Minute}, partingEvent{at: time.Minute, which: 1})
	for len(p.events) > 0 {
		e := p.events[0]
		next := partingEvent{at: e.at + 1}
		for which, m := range p.machine {
			if at, ok := m.Deadline(); ok && at < next.at {
				next = partingEvent{at: at, which: which}
			}
		}
		if next.at <= e.at {
			p.step(next.which, Input{Now: next.at})
			continue
		}
		p.events = p.events[1:]
		if e.input.Now = e.at; e.known {
			e.input.Message.Register.Known.Roster = *p.rosters[e.input.Line-1]
		}
		p.step(e.which, e.input)
	}
}

// step has a machine take an input. Ranks that it reaches hear what it says, and answer its questions.
func (p *parting) step(which int, in Input) {
	for _, o := range p.machine[which].Step(in) {
		m, rank := o.Message, int(o.Line)-1
		if m == nil || which == 0 && in.Now >= p.cut[rank] {
			continue
		}
		switch {
		case m.Roster != nil:
			p.rosters[rank] = m.Roster
		case m.Lost != nil && m.Lost.Rank != rank:
			p.told[which] = true
		case m.Progress != nil:
			answer := partingEvent{at: in.Now + time.Millisecond, which: which, input: Input{Line: o.Line, Message: &wire.Control{Progress: m.Progress}}}
			i, _ := slices.BinarySearchFunc(p.events, answer, func(a, b partingEvent) int { return cmp.Compare(a.at, b.at) })
			p.events = slices.Insert(p.events, i, answer)
		}
	}
}
