// Package handover takes a job from one epoch to the next while training runs: three machines, one for each role, that
// agree on the iteration from which an epoch holds and lose no push on the way. Decision 71 has the protocol; it is
// for sums under BSP, in which a rank pushes an iteration of a key when it has the result of the one before.
//
//	Ballot   the scheduler's half: collects what has been pushed, and commits the next epoch
//	Pusher   a worker's half: holds new iterations while a ballot runs, keeps what a lost server may ask for again
//	Keeper   a server's half: admits, refuses or parks pushes by their epoch, closes iterations, takes lost servers' keys over
//
// They exchange Messages, which the caller carries in any order, late and more than once, but not never: a lost connection is
// a lost peer. Payloads are the caller's.
package handover

import (
	"github.com/paceline/paceline/core/membership"
)

// Key is a partition of a tensor.
type Key struct {
	Tensor uint32
	Part   int
}

// Kind is what a message says.
type Kind uint8

// Kinds of messages.
const (
	Prepare   Kind = iota // scheduler to all: report, and begin no iteration before the commit
	Prepared              // to the scheduler: Counts
	Committed             // scheduler to all: Commit
	Push                  // worker to server: Payload is its contribution to Iteration of Key
	Refused               // server to worker: the push belongs to Epoch, repeat it there
	Result                // server to worker: Payload is the sum of Iteration of Key
	Resume                // worker to the heir of a lost server: State of Key
)

// Message is one of the protocol. From and To are incarnations; 0 is the scheduler.
type Message struct {
	Kind      Kind
	From, To  uint64
	Epoch     uint32 // of the sender, or that it prepares
	Key       Key
	Iteration uint64
	Payload   any
	State     State
	Counts    map[Key]uint64 // of Prepared: iterations that the sender has seen pushed, its own or others'
	Results   map[Key]uint64 // of Prepared: iterations whose result a worker has
	Commit    *Commit
}

// State is how far a rank has come with a key.
type State struct {
	Start   uint64 // its first iteration: that from which the rank's first epoch holds
	Pushed  uint64 // iterations that it has begun to push, and the number of the next one
	Results uint64 // iterations whose result it has
	Last    any    // result of iteration Results-1, unless that is before Start
	Open    any    // its push of iteration Results, if that has begun
}

// received reports whether the rank got the result of an iteration.
func (s State) received(iteration uint64) bool { return s.Start <= iteration && iteration < s.Results }

// Commit is an epoch, and what its machines have to know of the ones before.
type Commit struct {
	Epoch     *membership.Epoch
	Members   map[uint64]Member // the live workers
	Routes    Routes
	Inherited map[Key]bool // keys of which some iterations have lost their server; the key's server in the epoch is the heir
}

// Member is when a worker came.
type Member struct {
	Epoch uint32
	First map[Key]uint64 // its first iteration of each key: the greatest that anyone had pushed, plus one
}

// Leg is the server of a key from one iteration on.
type Leg struct {
	From   uint64
	Server uint64 // incarnation
}

// Routes is the legs of each key, in order; iterations before the first of them are over for everybody.
type Routes map[Key][]Leg

// at is the server of an iteration.
func (r Routes) at(k Key, iteration uint64) uint64 {
	legs := r[k]
	for i := len(legs) - 1; i > 0; i-- {
		if legs[i].From <= iteration {
			return legs[i].Server
		}
	}
	return legs[0].Server
}

// now is the server of a key in the epoch.
func (r Routes) now(k Key) uint64 { return r[k][len(r[k])-1].Server }

// next is the routes of the next epoch. A key that moves goes to its new server from the key's first iteration in that epoch on,
// and older ones stay where they are; what was on a server that has gone is inherited by the key's new server. What lies before the least of
// results is over.
func (r Routes) next(e *membership.Epoch, first, results map[Key]uint64) (Routes, map[Key]bool) {
	next, inherited, alive := Routes{}, map[Key]bool{}, incarnations(e)
	for k, server := range servers(e) {
		var legs []Leg
		add := func(l Leg) {
			if len(legs) == 0 || legs[len(legs)-1].Server != l.Server {
				legs = append(legs, l)
			}
		}
		for _, l := range r[k] {
			if !alive[l.Server] {
				l.Server, inherited[k] = server, true
			}
			add(l)
		}
		add(Leg{first[k], server})
		for len(legs) > 1 && legs[1].From <= results[k] {
			legs = legs[1:]
		}
		next[k] = legs
	}
	return next, inherited
}

// servers is the incarnation of the server of each key.
func servers(e *membership.Epoch) map[Key]uint64 {
	at := map[Key]uint64{}
	for t := range e.Keys.Each() {
		for part, s := range t.Servers {
			at[Key{t.Number, part}] = e.Servers[s].Incarnation
		}
	}
	return at
}

// incarnations is the processes of an epoch.
func incarnations(e *membership.Epoch) map[uint64]bool {
	all := workers(e)
	for i := range e.Servers {
		if e.Servers[i].State != membership.Gone {
			all[e.Servers[i].Incarnation] = true
		}
	}
	return all
}

// workers is the incarnations of the live workers.
func workers(e *membership.Epoch) map[uint64]bool {
	all := map[uint64]bool{}
	for i := range e.Workers {
		if e.Workers[i].State == membership.Live {
			all[e.Workers[i].Incarnation] = true
		}
	}
	return all
}
