// Package task is the life of one partition's exchange between a worker and a server, as a pure machine: what may
// happen next, when memory is free, and when the operation that the task belongs to may go on. It knows neither the
// bytes nor the way they take; the caller owns both, and does what a step's effects say.
//
//	declared ─► encoding ─► encoded ─► queued ─► moving ─► sent ─► (confirmed)
//	    └────────────────────────────────►┘          └───► failed
//
// Beside that runs the answer, where one is due: awaited ─► arriving ─► arrived, or missing where the server gave the
// task up. It may overtake the end of sending.
package task

import (
	"strings"

	"github.com/paceline/paceline/internal/invariant"
)

// State is where a task is: a value of four bytes, so that a caller may keep it in an atomic variable and step it
// from any goroutine. The zero value is a declared task whose answer nobody waits for.
//
// Invariants:
//
//  1. A task settles once, and not while somebody reads or writes its memory (encoding, moving, arriving).
//  2. The memory that a task is sent from is released once, and not while it is read. Where it is retained, that is
//     not before the server has confirmed that the push counts, or the task is abandoned.
//  3. A task that is not abandoned settles when it is sent and its answer, if one is due, has arrived.
//  4. Memory that is lent is in use from when it moves until the answer has arrived or is missing.
//  5. An abandoned task begins nothing new, and is settled and released as soon as nobody uses its memory.
type State uint32

// The low bits of a State are its stage, above them lie the answer and the marks.
const (
	stageMask  State = 7
	replyShift       = 3
	replyMask  State = 7 << replyShift

	retained State = 1 << (6 + iota - 3) // memory is kept until confirmed
	confirmed
	abandoned
	settled
	released
	lent
)

// stage is how far a task has come on its way to the server.
type stage uint8

const (
	declared stage = iota
	encoding       // its input is read
	encoded        // its message waits to be queued
	queued
	moving // its memory is read
	sent   // its memory is not needed for sending any more
	failed // it was not encoded or not sent; the reason comes with Abandon
)

// reply is how far its answer has come.
type reply uint8

const (
	none     reply = iota
	awaited        // due, from the beginning
	arriving       // its memory is written
	arrived
	missing // the server gave it up; the reason comes with Abandon
)

// Mode is what is known of a task when it is made.
type Mode uint8

// Modes, to be combined.
const (
	// Answered tasks wait for an answer.
	Answered Mode = 1 << iota
	// Retained tasks keep the memory that they were sent from until Confirmed.
	Retained
	// Lent tasks, which are answered, give their server all of their memory from when they leave until it answers or gives them up.
	Lent
)

// New is the state of a task that was just made.
func New(m Mode) State {
	var s State
	if m&Answered != 0 {
		s = s.withReply(awaited)
	}
	if m&Retained != 0 {
		s |= retained
	}
	if m&Lent != 0 {
		s |= lent
	}
	return s
}

// Event is something that happens to a task.
type Event uint8

// Events. The first five begin something, and are refused where that may not begin: of an abandoned task nothing
// does. The caller of an event that was not refused has what it begins for itself.
const (
	Encode       Event = iota // the encoder begins to read the input
	Queue                     // it waits for its server from now on, and may be answered
	Move                      // its memory is read from now on
	Arrive                    // its answer is there, and is written to its memory from now on
	Again                     // its server is lost, and nobody uses its memory, which was retained: it is to be queued for another
	Encoded                   // the message is whole
	EncodeFailed              // there is no message; the reason comes with Abandon
	Sent                      // nobody reads its memory any more
	SendFailed                // nor here, but it may not have left; the reason comes with Abandon
	Answer                    // the answer has been read, or why it cannot be is known
	GiveUp                    // there is no answer: the server gave it up, and the reason comes with Abandon
	BreakOff                  // what has arrived of the answer is nothing: the connection has ended
	Confirm                   // the server will not ask for it again
	Abandon                   // its operation has failed: what has not begun is left
	Events                    // how many there are
)

// Effects are what the caller has to do after a step.
type Effects uint8

// Effects, in the order in which they are to be done.
const (
	Refused Effects = 1 << iota // the event does not begin what it would; nothing else to do
	Forget                      // an answer that still comes is nobody's
	Release                     // the memory that it is sent from is free
	Settle                      // the task is done with, for its operation
)

// Step tells a task what has happened. It returns the state that follows, and what to do.
func (s State) Step(e Event) (State, Effects) {
	next, ok := s.follow(e)
	if !ok {
		return s, Refused
	}
	var out Effects
	if next&abandoned != 0 && next.reply() == awaited {
		next = next.withReply(none)
		if next.stage() >= queued {
			out |= Forget
		}
	}
	if next&released == 0 && next.free() {
		next |= released
		out |= Release
	}
	if next&settled == 0 && next.over() {
		next |= settled
		out |= Settle
	}
	return next, out
}

// follow is the state that an event leads to, before its effects, and whether it may lead there.
func (s State) follow(e Event) (next State, ok bool) {
	begins := s&abandoned == 0
	switch e {
	case Encode:
		return s.withStage(encoding), begins && s.stage() == declared
	case Queue:
		return s.withStage(queued), begins && (s.stage() == declared || s.stage() == encoded)
	case Move:
		ok = begins && s.stage() == queued
		if s&lent != 0 && s.reply() == awaited {
			s = s.withReply(arriving)
		}
		return s.withStage(moving), ok
	case Arrive:
		return s.withReply(arriving), begins && s.reply() == awaited && s.stage() >= queued
	case Again:
		return s.withStage(encoded), begins && s&(retained|confirmed) == retained && s.reply() == awaited && s.stage() >= queued && s.stage() != moving
	case Encoded:
		return s.after(e, s.stage() == encoding).withStage(encoded), true
	case EncodeFailed:
		return s.after(e, s.stage() == encoding).withStage(failed), true
	case Sent:
		return s.after(e, s.stage() == moving).withStage(sent), true
	case SendFailed:
		return s.after(e, s.stage() == moving).withStage(failed), true
	case Answer:
		return s.after(e, s.reply() == arriving).withReply(arrived), true
	case GiveUp:
		return s.after(e, s.reply() == arriving).withReply(missing), true
	case BreakOff:
		return s.after(e, s.reply() == arriving).withReply(awaited), true
	case Confirm:
		return s | confirmed, true
	default: // Abandon
		return s | abandoned, true
	}
}

// after checks that what an event ends had begun.
func (s State) after(e Event, begun bool) State {
	if invariant.On {
		invariant.Check(begun, "task: %v happens to a task that is %v", e, s)
	}
	return s
}

// free reports whether nobody needs the memory any more that the task is sent from.
func (s State) free() bool {
	switch s.stage() {
	case encoding, moving:
		return false
	case sent, failed:
		return s&(retained|abandoned) != retained || s&confirmed != 0
	default:
		return s&abandoned != 0
	}
}

// over reports whether the operation has to wait for the task no more.
func (s State) over() bool {
	if s.stage() == encoding || s.stage() == moving || s.reply() == arriving {
		return false
	}
	return s&abandoned != 0 || s.stage() == sent && (s.reply() == none || s.reply() == arrived)
}

// Settled reports whether the task is done with, for its operation.
func (s State) Settled() bool { return s&settled != 0 }

// Left reports whether the task waits for nothing that goes before it to its server.
func (s State) Left() bool { return s.stage() >= moving }

// Abandoned reports whether the task's operation has failed: a queue passes it over.
func (s State) Abandoned() bool { return s&abandoned != 0 }

func (s State) stage() stage { return stage(s & stageMask) }
func (s State) reply() reply { return reply(s & replyMask >> replyShift) }

func (s State) withStage(to stage) State { return s&^stageMask | State(to) }
func (s State) withReply(to reply) State { return s&^replyMask | State(to)<<replyShift }

var (
	stages  = [...]string{"declared", "encoding", "encoded", "queued", "moving", "sent", "failed"}
	replies = [...]string{"", "awaited", "arriving", "arrived", "missing"}
	marks   = [...]string{"retained", "confirmed", "abandoned", "settled", "released", "lent"}
	names   = [Events]string{"encode", "queue", "move", "arrive", "again", "encoded", "encode-failed", "sent", "send-failed", "answer", "give-up", "break-off", "confirm", "abandon"}
	effects = [...]string{"refused", "forget", "release", "settle"}
)

func (e Event) String() string { return names[e] }

// String lists the effects in the order in which they are to be done.
func (f Effects) String() string {
	var words []string
	for i, name := range effects {
		if f&(1<<i) != 0 {
			words = append(words, name)
		}
	}
	return strings.Join(words, ", ")
}

func (s State) String() string {
	words := []string{stages[s.stage()]}
	if s.reply() != none {
		words = append(words, "answer "+replies[s.reply()])
	}
	for i, name := range marks {
		if s&(retained<<i) != 0 {
			words = append(words, name)
		}
	}
	return strings.Join(words, ", ")
}
