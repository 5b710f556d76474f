package membership

import (
	"fmt"
	"slices"

	"github.com/paceline/paceline/core/placement"
)

// Change is what has happened to a job's members since an epoch began.
type Change struct {
	Workers []Node   // that join; each gets the least free rank
	Servers []Node   // dedicated ones that join; each gets the least free index, and in an elastic job the next one
	Drain   []int    // indices of servers whose keys move to others
	Leave   []Member // that leave on purpose; a server has to be drained before
	Lose    []Loss
	Pushed  []uint64 // how many iterations the furthest rank has pushed, as each server says

	// Profiles are those of the servers by index, where they ask for a remap, or are known when members change.
	Profiles placement.Profiles
	// Remap has keys of an elastic job move from servers that stay: as the policy decides, or else so that all have equal bytes.
	Remap bool
	// Tries is how many decisions of the policy have moved nothing: its random choices are others in the next one.
	Tries int
	// Moved are the moves of an elastic job as another node knows them, where they are later than the epoch's.
	Moved Moved
}

// Loss is a member whose process ended without a goodbye, or a server that has been drained: the keys of both go on at their heirs.
type Loss struct {
	Member
	Drained bool // it has answered all that only it could answer, and said goodbye
	Why     string
	// Among is how many servers had ever been in the job by then, where another node says it: those that joined later are no heirs of the
	// member's keys. 0: as many as the epoch has.
	Among int
}

// Departure is a process that has been a member.
type Departure struct {
	Member
	Incarnation uint64
	Epoch       uint32 // the first one without it
	Lost        bool   // it ended without a goodbye
	Drained     bool   // a server of an elastic job that left empty
	Among       int    // how many servers had ever been in the job: its heirs are among them
	Why         string
}

// Notice is what the process hears if it still runs: why it is no member, and since which epoch.
func (d Departure) Notice() string {
	return fmt.Sprintf("%s (it is no member since epoch %d, and the others go on without it)", d.Why, d.Epoch)
}

// keptDepartures bounds how many of them an epoch remembers.
const keptDepartures = 1 << 12

// GoneError says why a process is no longer a member.
type GoneError struct{ Departure }

func (e *GoneError) Error() string {
	if e.Lost {
		return fmt.Sprintf("%v was declared lost in epoch %d (%s); the job goes on without it", e.Member, e.Epoch, e.Why)
	}
	return fmt.Sprintf("%v left the job in epoch %d; the job goes on without it", e.Member, e.Epoch)
}

// Return checks a process that reconnects: nil where it is still a member, else why it is not.
func (e *Epoch) Return(m Member, incarnation uint64) error {
	if n := e.Node(m); n != nil && n.Incarnation == incarnation {
		return nil
	}
	for _, d := range slices.Backward(e.gone) {
		if d.Incarnation == incarnation {
			return &GoneError{d}
		}
	}
	return fmt.Errorf("process %#x is not %v of the job", incarnation, m)
}

// Departures are the processes that have gone, the oldest first.
func (e *Epoch) Departures() []Departure { return slices.Clone(e.gone) }

// firstAfter is the iteration from which the next epoch holds: the greatest that anyone has pushed, plus one. pushed has,
// for each server, the iterations of its furthest rank.
func (e *Epoch) firstAfter(pushed []uint64) uint64 {
	first := e.First
	for _, n := range pushed {
		first = max(first, n) // iterations are counted from 0
	}
	return first
}

// Anew is the next epoch with the same members, in which nothing is declared and iterations are counted from 0: all
// ranks have joined, in Horovod's sense, and have used their tensors unequally often.
func (e *Epoch) Anew() *Epoch {
	return &Epoch{
		Round: e.Round, Number: e.Number + 1, Origin: e.Number + 1, Joins: e.Joins + 1, Policy: e.Policy, Elastic: e.Elastic, added: e.added,
		Workers: e.Workers, Servers: e.Servers, gone: e.gone, moved: e.moved, Here: e.Here,
	}
}

// Next is the epoch after a change. Keys whose server is no longer live are placed again by the policy, all others
// keep their server, unless the policy remaps. An error names the part of the change that is impossible; the epoch then stays current.
func (e *Epoch) Next(c Change) (*Epoch, error) {
	next := &Epoch{
		Round: e.Round, Number: e.Number + 1, First: e.firstAfter(c.Pushed), Origin: e.Origin, Joins: e.Joins, Policy: e.Policy, Elastic: e.Elastic, added: e.added,
		Workers: slices.Clone(e.Workers), Servers: slices.Clone(e.Servers), gone: slices.Clone(e.gone), moved: e.moved, Here: e.Here,
	}
	for _, l := range c.Lose {
		if !e.Has(l.Member) {
			return nil, fmt.Errorf("%v is no member and cannot be lost", l.Member)
		}
		if next.Has(l.Member) { // it did not go with another member of its process, or by another report
			next.lose(l)
		}
	}
	if len(c.Lose) > 0 {
		next.revive()
	}
	for _, index := range c.Drain {
		if err := next.drain(index); err != nil {
			return nil, err
		}
	}
	for _, m := range c.Leave {
		if err := next.leave(m); err != nil {
			return nil, err
		}
	}
	if err := next.check(); e.Elastic && err != nil {
		return nil, err // who joins now inherits nothing of those that have gone
	}
	for _, n := range c.Workers {
		next.joinWorker(n)
	}
	for _, n := range c.Servers {
		next.joinServer(n, Dedicated)
	}
	err := next.check()
	if err == nil {
		err = next.follow(c.Moved)
	}
	if err == nil {
		err = next.inherit(e, c)
	}
	if err != nil {
		return nil, err
	}
	return next, nil
}

// lose frees the place of a member, and that of the server or the worker in the same process.
func (e *Epoch) lose(l Loss) {
	if l.Role == ServerRole && e.shares(l.Number) {
		l.Member = Member{WorkerRole, e.Servers[l.Number].Rank}
	}
	if l.Role == WorkerRole {
		if i := e.Embedded(l.Number); i >= 0 {
			e.Servers[i].State = Gone
		}
	}
	e.depart(Departure{Member: l.Member, Lost: !l.Drained, Drained: l.Drained, Among: l.Among, Why: l.Why})
}

// revive ends the drains of servers that stay, where a loss has left no other server.
func (e *Epoch) revive() {
	if slices.ContainsFunc(e.Servers, func(s Server) bool { return s.State == Live }) {
		return
	}
	for i := range e.Servers {
		if e.Servers[i].State == Draining && (e.Servers[i].Rank == Dedicated || e.shares(i)) {
			e.Servers[i].State = Live
		}
	}
}

func (e *Epoch) drain(index int) error {
	m := Member{ServerRole, index}
	if !e.Has(m) {
		return fmt.Errorf("%v is no member and cannot be drained", m)
	}
	e.Servers[index].State = Draining
	return nil
}

// leave frees the place of a member that leaves on purpose. A process departs with its last member: the server in a
// worker's process stays to be drained, and a worker stays without its server.
func (e *Epoch) leave(m Member) error {
	switch {
	case !e.Has(m):
		return fmt.Errorf("%v is no member and cannot leave", m)
	case m.Role == ServerRole && e.Servers[m.Number].State != Draining:
		return fmt.Errorf("%v cannot leave before it is drained", m)
	case m.Role == ServerRole && e.shares(m.Number):
		e.Servers[m.Number].State = Gone
		return nil
	case m.Role == WorkerRole && e.Embedded(m.Number) >= 0:
		e.Servers[e.Embedded(m.Number)].State = Draining
		e.Workers[m.Number].State = Gone
		return nil
	}
	e.depart(Departure{Member: m})
	return nil
}

// depart frees the place of a process and records its departure.
func (e *Epoch) depart(d Departure) {
	d.Incarnation, d.Epoch = e.Node(d.Member).Incarnation, e.Number
	if d.Among == 0 {
		d.Among = len(e.Servers)
	}
	if d.Role == ServerRole {
		e.Servers[d.Number].State = Gone
	} else {
		e.Workers[d.Number].State = Gone
	}
	e.gone = append(e.gone, d)
	e.gone = e.gone[max(0, len(e.gone)-keptDepartures):]
}

// joinWorker gives a worker the least free rank, and its server a place.
func (e *Epoch) joinWorker(n Node) {
	rank := 0
	for rank < len(e.Workers) && (e.Workers[rank].State != Gone || e.Embedded(rank) >= 0) {
		rank++
	}
	if rank == len(e.Workers) {
		e.Workers = append(e.Workers, Worker{})
	}
	e.Workers[rank] = Worker{Node: n}
	if len(n.Addresses) > 0 && !n.HostSums {
		e.joinServer(n, rank)
	}
}

// joinServer gives a server the least free index; in an elastic job, whose nodes remember which server a key was on, one that no other has had.
func (e *Epoch) joinServer(n Node, rank int) {
	index := slices.IndexFunc(e.Servers, func(s Server) bool { return s.State == Gone })
	if index < 0 || e.Elastic {
		index = len(e.Servers)
		e.Servers = append(e.Servers, Server{})
		e.added++
	}
	e.Servers[index] = Server{Node: n, Rank: rank}
}
