package sums

import (
	"fmt"
	"slices"
	"time"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/handover"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// iterations is what a key's lock guards. The machine decides, the slots hold the bytes, and answers are returned to be
// sent without the lock.
type iterations struct {
	*room.Part
	machine *condition.Machine
	outputs []condition.Output
	answers []answer  // an empty list, while none are being sent
	now     time.Time // of the event that is handled: what it sets free has waited for it
	changes room.Changes

	whereabouts room.Whereabouts
	left        bool         // its residual has been given away, because the server is about to leave: nothing is taken any more
	inherited   handover.Key // iterations before the open one that a lost server has closed

	climbOf func(*slot) (push func(wire.Header, []byte), abandon func()) // the key's, for sums of a host

	slots map[uint64]*slot // iterations that are open, or closed and not yet answered to all
	spare *slot

	behind rankset.Set // close's, of an iteration

	before   uint64       // coded: iterations that the tensor had before it was declared, as the rank says that knows of most
	residual *room.Buffer // coded: of the answers; nil before the first
	handed   handed       // coded: the last one that went elsewhere, until another one is here
	here     rankset.Set  // coded: ranks that have pushed here, or brought a residual, and were not sent away since: their next push comes here, too
}

// waiter is a rank that gets the result.
type waiter struct {
	rank   int
	seq    uint64 // of its request
	source uint16 // as its request has it
	to     room.Reply
	came   time.Time // when its push had arrived
	memory bool      // it gets none, and waits only until its tensor is not read any more
}

// answer is a reply that is due.
type answer struct {
	to        room.Reply
	iteration uint64
	divisor   uint32
	last      int // the rank that the sum waited for longest
	sum       *room.Buffer
	placed    bool // it lies where it belongs

	up      *slot        // instead of an answer: the sum of a host, which goes on
	gone    bool         // the iteration of a local waiter was given up
	moved   bool         // instead of an answer: the key is at another server now
	carries *room.Buffer // of these to one rank that has pushed: the residual; else nil
	refused error        // instead of an answer: why the push was not taken, or there is no sum
	seq     uint64       // of the operation that is answered or refused
	source  uint16
	wait    time.Duration // of the answer for other ranks
	kept    error         // instead of an answer: why a change of conditions came too late for those who still take part
}

// open finds or makes the slot for a push that begins to arrive; nil if the push does not count, because its iteration is
// given up, was closed without waiting for its rank, or its rank has begun it before.
func (n *iterations) open(q *room.Request) (*slot, error) {
	if n.left {
		return nil, nil
	}
	if n.Coding != nil {
		n.before = max(n.before, uint64(q.Before))
		n.here.Add(q.From())
	}
	if n.Round.Elastic {
		if err := n.reach(q.Iteration); err != nil {
			return nil, err
		}
	}
	if s := n.slots[q.Iteration]; s != nil {
		switch {
		case s.closed && !s.started.Has(q.From()) && !s.absent.Has(q.From()):
			return nil, errLeftOut
		case s.closed || !s.started.Add(q.From()):
			return nil, nil
		}
		return s, nil
	}
	if n.Gone(q.Iteration) || !n.machine.Live().Has(q.From()) {
		return nil, nil
	}
	if q.Iteration < n.machine.V() { // closed, by a server that is lost if the job is elastic
		switch {
		case !n.Round.Elastic:
			return nil, errLeftOut
		case !n.Model.Whole():
			return nil, errStraggler
		}
	}
	s := n.spare
	n.spare = nil
	if s == nil {
		s = newSlot(n.Part)
	}
	if err := s.begin(q.Seq); err != nil {
		return nil, err
	}
	s.started.Add(q.From())
	n.slots[q.Iteration] = s
	return s, nil
}

// accepts reports whether bytes still count for a slot: it was not given up, nor closed without this rank.
func (n *iterations) accepts(s *slot, iteration uint64) bool {
	return n.slots[iteration] == s && !s.closed
}

// arrived counts a push that has arrived whole.
func (n *iterations) arrived(s *slot, q *room.Request) (answers []answer) {
	answers, n.answers, n.now = n.answers, nil, time.Now()
	rank := q.From()
	s.absent.Remove(rank)
	if !s.closed {
		s.last = n.Completed(q)
	}
	if n.Round.Elastic && !s.closed {
		if q.Iteration < n.machine.V() {
			return n.lacks(s, q, answers)
		}
		s.came.Add(rank)
	}
	switch {
	case !q.Has(wire.FlagNoPull):
		s.owed++
		s.waiters = append(s.waiters, waiter{rank: rank, seq: q.Seq, source: q.Source, to: q.Reply, came: n.now})
		answers = n.step(condition.Pull(rank, q.Iteration), answers)
	case s.lentBy(rank) != nil:
		s.waiters = append(s.waiters, waiter{rank: rank, to: q.Reply, memory: true})
	default:
		answers = append(answers, answer{to: q.Reply})
	}
	answers = n.step(condition.Push(rank, q.Iteration, q.Significance), answers)
	answers = n.misses(q.Iteration, s, answers)
	if s.closed && n.slots[q.Iteration] == s {
		n.release(q.Iteration, s)
	}
	if len(answers) == 0 {
		n.answers = answers
	}
	return answers
}

// step drives the machine and carries out its outputs on the slots.
func (n *iterations) step(in condition.Input, answers []answer) []answer {
	n.outputs = n.machine.Step(in, n.outputs[:0])
	for _, o := range n.outputs {
		switch o.Kind {
		case condition.Advance:
			answers = n.close(o, answers)
		case condition.Answer:
			answers = n.answer(o, answers)
		case condition.Refuse:
			if o.Rank < 0 { // the old condition stays
				answers = append(answers, answer{kept: o.Err})
				continue
			}
			a := answer{refused: o.Err}
			if s := n.slots[o.Progress]; s != nil {
				a.seq = s.seq
			}
			answers = append(answers, a)
		}
	}
	return n.turn(answers)
}

// turn makes the changes whose iteration has come.
func (n *iterations) turn(answers []answer) []answer {
	for {
		in, ok := n.changes.Due(n.machine.V())
		if !ok {
			return answers
		}
		answers = n.step(in, answers)
	}
}

// close turns the sum into the result.
func (n *iterations) close(o condition.Output, answers []answer) []answer {
	s := n.slots[o.Progress]
	if s == nil {
		return answers
	}
	s.closed = true
	// Averages divide by the ranks that have joined too.
	o.Contributors = n.Behind(o.Contributors, &n.behind)
	s.divisor = uint32(len(n.Ranks) - n.Members.Without(n.Zeros(), o.Contributors))
	s.absent.Copy(n.machine.Live())
	s.absent.Subtract(o.Contributors)
	if err := n.total(s, o); err != nil {
		return n.spoil(o.Progress, s, err, answers)
	}
	s.waiters = slices.DeleteFunc(s.waiters, func(w waiter) bool {
		if w.memory {
			answers = append(answers, answer{to: w.to})
		}
		return w.memory
	})
	if n.Up() {
		if s.up.push == nil {
			s.up.push, s.up.abandon = n.climbOf(s)
		}
		s.up.begun, s.up.iteration = true, o.Progress
		return append(answers, answer{up: s, iteration: o.Progress})
	}
	n.release(o.Progress, s)
	if n.Round.Elastic {
		n.passed(o.Progress)
	}
	return answers
}

// total makes the result of what the contributors brought.
func (n *iterations) total(s *slot, o condition.Output) error {
	if s.inPlace(o.Contributors) {
		s.storeInPlace()
		return nil
	}
	empty, err := s.finish(o.Contributors)
	switch {
	case err != nil:
		return err
	case empty && n.Up(): // the memory is for the answer
		s.acc, s.result, s.up.empty = nil, room.NewBuffer(n.Round.Pool, s.acc[:s.Bytes]), true
		return nil
	case empty:
		n.Round.Pool.Put(s.acc)
		s.acc, s.result = nil, room.NewBuffer(n.Round.Pool, nil)
		return nil
	case n.Coding != nil:
		return n.encode(s, o.Progress)
	}
	s.store()
	return nil
}

// spoil gives up an iteration of which there is no result: the operation fails on every rank.
func (n *iterations) spoil(iteration uint64, s *slot, err error, answers []answer) []answer {
	answers = append(answers, answer{refused: err, seq: s.seq})
	for _, w := range s.waiters {
		answers = append(answers, answer{to: w.to, gone: true})
	}
	s.drop()
	delete(n.slots, iteration)
	n.trim()
	return answers
}

// answer takes a waiter out of its slot; its reply is due.
func (n *iterations) answer(o condition.Output, answers []answer) []answer {
	s := n.slots[o.Progress]
	if s == nil || s.up.begun {
		return answers
	}
	for i, w := range s.waiters {
		if w.rank != o.Rank {
			continue
		}
		s.waiters = append(s.waiters[:i], s.waiters[i+1:]...)
		answers = append(answers, answer{to: w.to, seq: w.seq, source: w.source, iteration: o.Progress, divisor: s.divisor, last: s.last, sum: s.result.Share(), placed: s.placed, wait: n.now.Sub(w.came)})
		s.owed--
		n.release(o.Progress, s)
		break
	}
	return answers
}

// release frees a slot that is closed and answered to everybody who will ask.
func (n *iterations) release(iteration uint64, s *slot) {
	if !s.closed || s.up.begun || s.owed > 0 || s.absent.Len() > 0 {
		return
	}
	delete(n.slots, iteration)
	n.trim()
	s.result.Sent(nil)
	s.reset()
	n.spare = s
}

// live updates who takes part.
func (n *iterations) live(live rankset.Set) []answer {
	if live.Len() == 0 {
		return nil
	}
	n.now = time.Now()
	n.handed.keepFor(live)
	answers := n.step(condition.Live(live), nil)
	for _, iteration := range n.inherited.Live(live) {
		answers = n.sum(iteration, answers)
	}
	for iteration, s := range n.slots {
		if s.closed && s.absent.Len() > 0 {
			s.absent = s.absent.Overlap(live)
			n.release(iteration, s)
		}
	}
	n.forgetLost()
	return answers
}

// cancel gives up the slots from an iteration on, and returns who waited, and what is to be abandoned.
func (n *iterations) cancel(from uint64) (dropped []waiter, abandon []func()) {
	for i, s := range n.slots {
		if i < from {
			continue
		}
		dropped = append(dropped, s.waiters...)
		switch {
		case s.up.begun: // it has left, or is about to
			abandon = append(abandon, s.up.abandon)
		case s.closed:
			s.result.Sent(nil)
		default:
			s.drop()
		}
		delete(n.slots, i)
	}
	n.inherited.GiveUp(from)
	n.trim()
	return dropped, abandon
}

// misses fails an iteration that cannot be done without ranks that have gone. Its home server lets it go on where these had come to it: they were lost before they had pushed
// all partitions.
func (n *iterations) misses(iteration uint64, s *slot, answers []answer) []answer {
	if err := n.broken(iteration); err != nil {
		answers = append(answers, answer{refused: err, seq: s.seq})
	}
	return answers
}

// broken says why an iteration cannot be done, nil if it can. While others than those that have gone have not pushed it here, one of them may have its result to supply.
func (n *iterations) broken(iteration uint64) error {
	if !n.Round.Elastic || !n.Kind.Splits() || n.Confirms() {
		return nil
	}
	missing := n.machine.Missing(iteration)
	if by := n.inherited.By(iteration); by.Len() > 0 {
		missing = n.machine.Live().Minus(by)
	}
	if missing.Len() == 0 || !n.Lost().Covers(missing) {
		return nil
	}
	return fmt.Errorf("%s has gone, and %v needs every rank of its process set", missing.Named(), n.Kind)
}

// waitsFor lists the operations that wait for a rank.
func (n *iterations) waitsFor(rank int) (seqs []uint64) {
	for iteration, s := range n.slots {
		if n.machine.Missing(iteration).Has(rank) || n.broken(iteration) != nil {
			seqs = append(seqs, s.seq)
		}
	}
	return seqs
}
