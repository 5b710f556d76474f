// Package membership has the epochs of a round of the job: its members, the server of each key, and the iteration from
// which both hold. A job without losses, joins and drains has one epoch, which never changes.
//
// The rules are pure: Found makes a round's first epoch, Next the one that follows a change, Anew the one in which all
// ranks count iterations from 0 again. The parts of a process read the current epoch through a View. Read epoch.go
// first, then change.go, keys.go (which server has which key), dealer.go (how keys come to servers) and view.go.
package membership

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/rankset"
)

// Epoch is the membership of a round from one iteration to the next change. Its members never change, and any
// goroutine may read them; only the declarer of tensors adds and reads its keys.
//
// Invariants:
//  1. Numbers rise by one from each epoch to the next.
//  2. Every key is on exactly one server, which is live.
//  3. First never falls, unless Origin rises.
//  4. A place holds one incarnation at a time, and none that has gone comes back to any place.
type Epoch struct {
	Round  uint64 // one init to shutdown of all workers
	Number uint32
	// First is the iteration of each key from which the epoch holds: the greatest one that anybody has pushed, plus one.
	First uint64
	// Origin is the epoch since which iterations are counted: 0, or the last one that Anew has made.
	Origin uint32
	Joins  uint32 // how often Anew has been: the number of the count of iterations, which frames carry
	Policy string // how keys are placed, as placement.Parse reads it
	// Elastic says that the job goes on without a member that is lost; else its loss ends the job.
	Elastic bool
	// Left are ranks that have said goodbye: known to a server that has joined, which may not have heard it of them.
	Left rankset.Set
	Here int // index of the server in this process, -1 where there is none

	Workers []Worker // by rank
	Servers []Server // by index
	Keys    Keys     // which of them has what has been declared

	gone  []Departure // oldest first, the last keptDepartures
	added int         // servers that have joined since the round began, at indices that no other has had
	moved Moved
}

// Founders is how many servers the round began with: in an elastic job those that joined later have the indices from it on.
func (e *Epoch) Founders() int { return len(e.Servers) - e.added }

// Node is one process: a worker, with a server in it or without, or a dedicated server.
type Node struct {
	// Incarnation is the process's random number: the same as long as it lives, over all its connections, and
	// another one for whoever takes its place.
	Incarnation uint64
	Host        string // name of the machine, for people and for local ranks
	PID         int    // for messages
	Version     string // its release
	LocalRank   int    // of a worker, among those of its host
	LocalSize   int
	Addresses   address.List // of the server that it holds; none if it holds none
	Standby     string       // where a worker of an elastic job is asked for the scheduler when that is missed; "" where it stays in its place
	HostSums    bool         // that server has no keys: it sums what the workers of its host push (HostSums)
}

// State is the state of a member.
type State uint8

// States.
const (
	Live     State = iota
	Draining       // a server whose keys move away and that gets no new ones; it answers for earlier epochs
	Gone           // the place is free
)

// Worker is the place of a rank.
type Worker struct {
	Node
	State State // Live or Gone
}

// Server is the place of a server.
type Server struct {
	Node
	State State
	Rank  int // of the worker in whose process it is, or Dedicated
}

// Dedicated is the Rank of a server that has a process of its own.
const Dedicated = -1

// Role is what a member does in the job.
type Role uint8

// Roles.
const (
	WorkerRole Role = iota
	ServerRole
)

// Member names a place: a worker by its rank or a server by its index.
type Member struct {
	Role   Role
	Number int
}

func (m Member) String() string {
	if m.Role == ServerRole {
		return fmt.Sprintf("server %d", m.Number)
	}
	return fmt.Sprintf("rank %d", m.Number)
}

// Found makes the first epoch of a round: workers by rank and dedicated servers in any order. Embedded servers come
// first, in the order of ranks, then the dedicated ones in the order of their addresses.
func Found(round uint64, policy string, workers, dedicated []Node) (*Epoch, error) {
	e := &Epoch{Round: round, Policy: policy}
	for rank, n := range workers {
		e.Workers = append(e.Workers, Worker{Node: n})
		if len(n.Addresses) > 0 && !n.HostSums {
			e.Servers = append(e.Servers, Server{Node: n, Rank: rank})
		}
	}
	for _, n := range slices.SortedStableFunc(slices.Values(dedicated), func(a, b Node) int { return cmp.Compare(a.Addresses.String(), b.Addresses.String()) }) {
		e.Servers = append(e.Servers, Server{Node: n, Rank: Dedicated})
	}
	if len(e.Servers) == 0 && len(workers) > 0 {
		return nil, errors.New("the job has no server: no worker carries one (PACELINE_SERVERS=embedded or both) and no dedicated one was started (paceline server)")
	}
	if err := e.check(); err != nil {
		return nil, err
	}
	return e, nil
}

// check reports the first thing that is wrong with an epoch's members.
func (e *Epoch) check() error {
	switch {
	case e.Round == 0:
		return errors.New("the round has no number")
	case len(e.Workers) > limits.MaxRanks || len(e.Servers) > limits.MaxServers:
		return fmt.Errorf("%d workers (limit %d) and %d servers (limit %d)", len(e.Workers), limits.MaxRanks, len(e.Servers), limits.MaxServers)
	case !slices.ContainsFunc(e.Workers, func(w Worker) bool { return w.State == Live }):
		return errors.New("the job has no worker left")
	case !slices.ContainsFunc(e.Servers, func(s Server) bool { return s.State == Live }):
		return errors.New("the job has no server left that can hold keys")
	}
	return e.checkIncarnations()
}

// checkIncarnations reports a process in two places, or one that has left before.
func (e *Epoch) checkIncarnations() error {
	seen := make(map[uint64]Member, len(e.Workers)+len(e.Servers))
	for _, m := range e.processes() {
		n := e.Node(m)
		if n.Incarnation == 0 {
			return fmt.Errorf("%v has no incarnation", m)
		}
		if other, twice := seen[n.Incarnation]; twice {
			return fmt.Errorf("%v and %v are the same process %#x", other, m, n.Incarnation)
		}
		seen[n.Incarnation] = m
	}
	for _, d := range e.gone {
		if _, again := seen[d.Incarnation]; again {
			return &GoneError{d}
		}
	}
	return nil
}

// processes names each process of the job once.
func (e *Epoch) processes() []Member {
	var all []Member
	for rank := range e.Workers {
		if e.Workers[rank].State == Live {
			all = append(all, Member{WorkerRole, rank})
		}
	}
	for i := range e.Servers {
		if e.Servers[i].State != Gone && !e.shares(i) {
			all = append(all, Member{ServerRole, i})
		}
	}
	return all
}

// shares reports whether a server is in the process of a live worker.
func (e *Epoch) shares(index int) bool {
	rank := e.Servers[index].Rank
	return rank != Dedicated && e.Workers[rank].State == Live
}

// Live is the ranks of the live workers.
func (e *Epoch) Live() rankset.Set {
	var live rankset.Set
	for rank := range e.Workers {
		if e.Workers[rank].State == Live {
			live.Add(rank)
		}
	}
	return live
}

// Has reports whether a member is there.
func (e *Epoch) Has(m Member) bool { return e.Node(m) != nil }

// Node is the process of a member that is there, else nil.
func (e *Epoch) Node(m Member) *Node {
	switch {
	case m.Number < 0:
	case m.Role == ServerRole && m.Number < len(e.Servers) && e.Servers[m.Number].State != Gone:
		return &e.Servers[m.Number].Node
	case m.Role == WorkerRole && m.Number < len(e.Workers) && e.Workers[m.Number].State != Gone:
		return &e.Workers[m.Number].Node
	}
	return nil
}

// Embedded is the index of the server in a worker's process, -1 where it holds none.
func (e *Epoch) Embedded(rank int) int {
	return slices.IndexFunc(e.Servers, func(s Server) bool { return s.Rank == rank && s.State != Gone })
}

// ServerOf is the index of the server that goes with a member: itself, or the one in the worker's process; -1 where there is none.
func (e *Epoch) ServerOf(m Member) int {
	if m.Role == ServerRole {
		return m.Number
	}
	return e.Embedded(m.Number)
}

// Mixed reports whether some servers have processes of their own.
func (e *Epoch) Mixed() bool {
	return slices.ContainsFunc(e.Servers, func(s Server) bool { return s.Rank == Dedicated && s.State != Gone })
}

// Spread reports whether workers are on several hosts, lost ones among them.
func (e *Epoch) Spread() bool {
	return slices.ContainsFunc(e.Workers, func(w Worker) bool { return w.Host != e.Workers[0].Host })
}

// live is the incarnation of each server that holds keys, by its index.
func (e *Epoch) live() map[int]uint64 {
	live := map[int]uint64{}
	for i, s := range e.Servers {
		if s.State == Live {
			live[i] = s.Incarnation
		}
	}
	return live
}

// Weights is the share of the keys that each server should have; 0 for those that get none.
func (e *Epoch) Weights() []float64 {
	weights := make([]float64, len(e.Servers))
	var live []int
	var dedicated []bool
	for i := range e.Servers {
		if e.Servers[i].State == Live {
			live, dedicated = append(live, i), append(dedicated, e.Servers[i].Rank == Dedicated)
		}
	}
	for j, w := range placement.Shares(dedicated) {
		weights[live[j]] = w
	}
	return weights
}
