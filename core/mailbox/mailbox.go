// Package mailbox matches the messages that ranks send to one rank with what that rank asks for, by the rules of MPI
// (MPI 4.0, section 3.5) and Gloo: a receive takes the earliest message of its source, or of any, that has its tag, and
// a message goes to the earliest receive that takes it. It knows neither the bytes nor the way they travel.
package mailbox

import (
	"slices"

	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/rankset"
)

// Any is the source of a receive that takes a message of any rank.
const Any = -1

// Box is the mailbox of one rank: the messages that wait for a receive, and the receives that wait for a message. M and
// R are what the caller notes of them. Numbers tell apart what one rank sends, or asks for.
//
// Invariants:
//
//  1. No message waits that a receive which waits would take.
//  2. Messages of one source and one tag are taken in the order in which they came.
//  3. No receive waits for ranks that have all gone.
type Box[M, R any] struct {
	others rankset.Set // the ranks of the job but the box's own
	gone   rankset.Set // of them
	came   uint64      // counts messages and receives, by whose order all is decided
	tags   map[uint64]*lane[M, R]
}

// lane is what waits under one tag. No queue in it is empty.
type lane[M, R any] struct {
	messages map[int]queue[M] // by source
	receives map[int]queue[R] // by the source that they name, or Any
}

// queue has what waits, the earliest first.
type queue[T any] []waiting[T]

type waiting[T any] struct {
	came, number uint64
	what         T
}

// New makes the empty box of a rank in a job of so many.
func New[M, R any](rank, size int) *Box[M, R] {
	b := &Box[M, R]{others: rankset.Range(size), tags: map[uint64]*lane[M, R]{}}
	b.others.Remove(rank)
	return b
}

// Claim takes out the receive that takes a message which comes from a rank now, if one waits. Otherwise the message is to
// be put.
func (b *Box[M, R]) Claim(from int, tag uint64) (r R, ok bool) {
	l := b.tags[tag]
	if l == nil {
		return r, false
	}
	named, any := l.receives[from], l.receives[Any]
	switch {
	case len(named) > 0 && (len(any) == 0 || named[0].came < any[0].came):
		r, ok = take(l.receives, from), true
	case len(any) > 0:
		r, ok = take(l.receives, Any), true
	}
	b.tidy(tag, l)
	return r, ok
}

// Put has a message wait that no receive takes.
func (b *Box[M, R]) Put(from int, tag, number uint64, m M) {
	l := b.lane(tag)
	if invariant.On {
		invariant.Check(len(l.receives[from])+len(l.receives[Any]) == 0, "mailbox: a message of rank %d with tag %d is put, which a receive takes", from, tag)
	}
	l.messages[from] = append(l.messages[from], waiting[M]{b.next(), number, m})
}

// Fate is what becomes of a receive.
type Fate int

// Fates.
const (
	Waits   Fate = iota
	Matched      // it has its message
	Gone         // there is no message, and whoever could send one has gone
)

// Receive takes the message that a receive takes now, or has the receive wait.
func (b *Box[M, R]) Receive(from int, tag, number uint64, r R) (m M, fate Fate) {
	l := b.lane(tag)
	source := from
	if from == Any {
		source = l.earliest()
	}
	switch {
	case len(l.messages[source]) > 0:
		m, fate = take(l.messages, source), Matched
	case b.unreachable(from):
		fate = Gone
	default:
		l.receives[from] = append(l.receives[from], waiting[R]{b.next(), number, r})
	}
	b.tidy(tag, l)
	return m, fate
}

// WithdrawMessage takes out a message that waits.
func (b *Box[M, R]) WithdrawMessage(from int, tag, number uint64) (m M, ok bool) {
	if l := b.tags[tag]; l != nil {
		m, ok = withdraw(l.messages, from, number)
		b.tidy(tag, l)
	}
	return m, ok
}

// WithdrawReceive takes out a receive that waits.
func (b *Box[M, R]) WithdrawReceive(from int, tag, number uint64) (r R, ok bool) {
	if l := b.tags[tag]; l != nil {
		r, ok = withdraw(l.receives, from, number)
		b.tidy(tag, l)
	}
	return r, ok
}

// Leave notes that a rank has gone. It takes out the receives that nobody can answer any more, and those messages of the
// rank that went with it.
func (b *Box[M, R]) Leave(rank int, went func(M) bool) (dropped []M, failed []R) {
	b.gone.Add(rank)
	for tag, l := range b.tags {
		var stay queue[M]
		for _, m := range l.messages[rank] {
			if went(m.what) {
				dropped = append(dropped, m.what)
			} else {
				stay = append(stay, m)
			}
		}
		set(l.messages, rank, stay)
		for from, receives := range l.receives {
			if b.unreachable(from) {
				failed = append(failed, contents(receives)...)
				delete(l.receives, from)
			}
		}
		b.tidy(tag, l)
	}
	return dropped, failed
}

// Empty takes out everything.
func (b *Box[M, R]) Empty() (messages []M, receives []R) {
	for _, l := range b.tags {
		for _, q := range l.messages {
			messages = append(messages, contents(q)...)
		}
		for _, q := range l.receives {
			receives = append(receives, contents(q)...)
		}
	}
	clear(b.tags)
	return messages, receives
}

// unreachable reports whether no message can come from a source any more.
func (b *Box[M, R]) unreachable(from int) bool {
	if from == Any {
		return b.gone.Covers(b.others)
	}
	return b.gone.Has(from)
}

func (b *Box[M, R]) next() uint64 {
	b.came++
	return b.came
}

// lane finds or makes the lane of a tag.
func (b *Box[M, R]) lane(tag uint64) *lane[M, R] {
	l := b.tags[tag]
	if l == nil {
		l = &lane[M, R]{messages: map[int]queue[M]{}, receives: map[int]queue[R]{}}
		b.tags[tag] = l
	}
	return l
}

// tidy forgets a tag under which nothing waits.
func (b *Box[M, R]) tidy(tag uint64, l *lane[M, R]) {
	if len(l.messages)+len(l.receives) == 0 {
		delete(b.tags, tag)
	}
}

// earliest is the source of the message that came first.
func (l *lane[M, R]) earliest() int {
	source, came := Any, uint64(0)
	for from, q := range l.messages {
		if source == Any || q[0].came < came {
			source, came = from, q[0].came
		}
	}
	return source
}

// take removes the first of a queue.
func take[T any](queues map[int]queue[T], of int) T {
	q := queues[of]
	first := q[0].what
	q[0] = waiting[T]{}
	set(queues, of, q[1:])
	return first
}

// withdraw removes the one with a number.
func withdraw[T any](queues map[int]queue[T], of int, number uint64) (what T, ok bool) {
	q := queues[of]
	i := slices.IndexFunc(q, func(w waiting[T]) bool { return w.number == number })
	if i < 0 {
		return what, false
	}
	what = q[i].what
	set(queues, of, slices.Delete(q, i, i+1))
	return what, true
}

func set[T any](queues map[int]queue[T], of int, q queue[T]) {
	if len(q) == 0 {
		delete(queues, of)
		return
	}
	queues[of] = q
}

func contents[T any](q queue[T]) []T {
	all := make([]T, len(q))
	for i := range q {
		all[i] = q[i].what
	}
	return all
}
