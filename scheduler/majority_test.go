package scheduler

import (
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
	told    [2]bool // the workers on a side were told that the job cannot go on there
	roster  *wire.Roster
	machine [2]*Machine // the old scheduler, the new one
}

type partingEvent struct {
	at    time.Duration
	which int // machine
	input Input
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
		goesOn := func(which int) bool {
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
		if got := [2]bool{goesOn(0), goesOn(1)}; got != [2]bool{oldRules || other == 0, other > 0 && !oldRules} {
			t.Fatalf("seed %d: here %v, dead %v: the sides go on: %v", seed, p.here, p.dead, got)
		}
	}
}

func number01(b bool) int {
	if b {
		return 1
	}
	return 0
}

func newParting(random *rand.Rand) *parting {
	p := &parting{ranks: 2 + random.IntN(6)}
	settings := Settings{FirstRound: 1, LostAfter: 10 * time.Second}
	p.machine = [2]*Machine{NewMachine(settings), NewMachine(settings)}
	for rank := range p.ranks {
		p.here, p.dead = append(p.here, rank == 0 || random.IntN(2) == 0), append(p.dead, random.IntN(6) == 0)
		p.step(0, Input{Line: Line(rank + 1), Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
		p.step(0, Input{Line: Line(rank + 1), Message: &wire.Control{ID: 1, Register: &wire.Register{Workers: p.ranks, Elastic: true, Node: p.node(rank)}}})
	}
	p.dead[0] = false // it has the old scheduler
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
		p.add(begin, 1, Input{Line: line, Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
		p.add(begin, 1, Input{Line: line, Message: &wire.Control{ID: 1, Register: &wire.Register{Workers: p.ranks, Elastic: true, Node: p.node(rank), Known: &wire.Known{Roster: *p.roster, Silent: silent}}}})
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
	p.events = append(p.events, partingEvent{at, which, in})
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
	for _, e := range append(p.events, partingEvent{at: time.Minute}, partingEvent{at: time.Minute, which: 1}) {
		for m := p.machine[e.which]; ; {
			at, ok := m.Deadline()
			if !ok || at > e.at {
				break
			}
			p.step(e.which, Input{Now: at})
		}
		e.input.Now = e.at
		p.step(e.which, e.input)
	}
}

func (p *parting) step(which int, in Input) {
	for _, o := range p.machine[which].Step(in) {
		if m := o.Message; m != nil && m.Roster != nil && p.roster == nil {
			p.roster = m.Roster
		} else if m != nil && m.Lost != nil && m.Lost.Rank != int(o.Line)-1 {
			p.told[which] = true
		}
	}
}
