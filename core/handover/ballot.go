package handover

import (
	"maps"

	"github.com/paceline/paceline/core/membership"
)

// Ballot is the scheduler's half. A change waits until every process that stays has reported; what happens meanwhile joins the
// same change, because the reports stay true: who has reported begins no iteration.
//
// Invariants:
//  1. An epoch is committed once, after a report of each of its processes that was in the one before.
//  2. No process has begun an iteration of a key after the first one of the epoch before it got the commit.
type Ballot struct {
	last    *Commit
	epoch   *membership.Epoch // of the last commit
	change  *membership.Change
	counts  map[Key]uint64  // the greatest reports
	results map[Key]uint64  // the least
	reports map[uint64]bool // who has reported
}

// NewBallot makes the half of a scheduler whose job is in its first epoch.
func NewBallot(e *membership.Epoch) *Ballot {
	b := &Ballot{epoch: e}
	b.last = b.commit(&Commit{}, e, nil, nil)
	return b
}

// Last is the last commit.
func (b *Ballot) Last() *Commit { return b.last }

// commit is the one after a commit.
func (b *Ballot) commit(before *Commit, e *membership.Epoch, first, results map[Key]uint64) *Commit {
	c := &Commit{Epoch: e, Members: map[uint64]Member{}}
	c.Routes, c.Inherited = before.Routes.next(e, first, results)
	for w := range workers(e) {
		m, known := before.Members[w]
		if !known {
			m = Member{e.Number, first}
		}
		c.Members[w] = m
	}
	return c
}

// Propose adds to the next change. What cannot be is refused; a loss, which is a fact, then takes the place of drains and leaves
// that wait, to be proposed again.
func (b *Ballot) Propose(c membership.Change) ([]Message, error) {
	merged := c
	if b.change != nil {
		merged = join(*b.change, c)
	}
	_, err := b.epoch.Next(merged)
	if err != nil && len(c.Lose) > 0 {
		merged.Drain, merged.Leave = nil, nil
		_, err = b.epoch.Next(merged)
	}
	if err != nil {
		return nil, err
	}
	var out []Message
	if b.change == nil {
		b.counts, b.results, b.reports = map[Key]uint64{}, nil, map[uint64]bool{}
		for p := range incarnations(b.epoch) {
			out = append(out, Message{Kind: Prepare, To: p, Epoch: b.epoch.Number + 1})
		}
	}
	b.change = &merged
	return append(out, b.decide()...), nil
}

// Reported handles a Prepared.
func (b *Ballot) Reported(m Message) []Message {
	if b.change == nil || m.Epoch != b.epoch.Number+1 || b.reports[m.From] || !incarnations(b.epoch)[m.From] {
		return nil
	}
	b.reports[m.From] = true
	for k, n := range m.Counts {
		b.counts[k] = max(b.counts[k], n)
	}
	if b.results == nil && m.Results != nil {
		b.results = maps.Clone(m.Results)
	}
	for k, n := range m.Results {
		b.results[k] = min(b.results[k], n)
	}
	return b.decide()
}

// decide commits the change when nobody who stays is missing.
func (b *Ballot) decide() []Message {
	next, err := b.epoch.Next(*b.change)
	if err != nil {
		return nil // Propose has checked the change
	}
	before := incarnations(b.epoch)
	for p := range incarnations(next) {
		if before[p] && !b.reports[p] {
			return nil
		}
	}
	b.last = b.commit(b.last, next, b.counts, b.results)
	b.epoch, b.change = next, nil
	var out []Message
	for p := range incarnations(next) {
		out = append(out, Message{Kind: Committed, To: p, Epoch: next.Number, Commit: b.last})
	}
	return out
}

// join is two changes as one.
func join(a, b membership.Change) membership.Change {
	if b.Profiles == nil {
		b.Profiles = a.Profiles
	}
	return membership.Change{
		Workers:  append(a.Workers[:len(a.Workers):len(a.Workers)], b.Workers...),
		Servers:  append(a.Servers[:len(a.Servers):len(a.Servers)], b.Servers...),
		Drain:    append(a.Drain[:len(a.Drain):len(a.Drain)], b.Drain...),
		Leave:    append(a.Leave[:len(a.Leave):len(a.Leave)], b.Leave...),
		Lose:     append(a.Lose[:len(a.Lose):len(a.Lose)], b.Lose...),
		Profiles: b.Profiles,
	}
}
