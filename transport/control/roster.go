package control

import (
	"fmt"
	"slices"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/each"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/transport/wire"
)

// EpochOf makes an epoch of its roster. An error names the first thing that is wrong with it.
func EpochOf(r *wire.Roster) (*membership.Epoch, error) {
	workers := make([]membership.Node, len(r.Workers))
	for rank, n := range r.Workers {
		if n.Rank != rank || n.Role != wire.RoleWorker {
			return nil, fmt.Errorf("place %d holds %s %d", rank, n.Role, n.Rank)
		}
		if err := n.Addresses.Check(); err != nil {
			return nil, fmt.Errorf("worker %d has %w", rank, err)
		}
		if len(n.Standby) > limits.MaxAddress {
			return nil, fmt.Errorf("worker %d has an address of %d bytes, limit %d", rank, len(n.Standby), limits.MaxAddress)
		}
		workers[rank] = NodeOf(&n)
	}
	founders := len(r.Servers) - r.Joined
	if r.Joined < 0 || founders < 0 || r.Joined > 0 && !r.Elastic {
		return nil, fmt.Errorf("%d of %d servers have joined (elastic: %v)", r.Joined, len(r.Servers), r.Elastic)
	}
	var dedicated, joined []membership.Node
	for i, n := range r.Servers {
		if err := n.Addresses.Check(); err != nil {
			return nil, fmt.Errorf("server %d has %w", i, err)
		}
		switch {
		case i >= founders:
			joined = append(joined, NodeOf(&n))
		case n.Role == wire.RoleServer:
			dedicated = append(dedicated, NodeOf(&n))
		}
	}
	e, err := membership.Found(r.Round, r.Placement, workers, dedicated)
	if err != nil {
		return nil, err
	}
	if !slices.EqualFunc(r.Servers[:founders], e.Servers, func(n wire.Node, s membership.Server) bool { return n.Session == s.Incarnation }) {
		return nil, fmt.Errorf("%d servers are not in their order", len(r.Servers))
	}
	e.Elastic = r.Elastic
	if len(joined) > 0 {
		if e, err = e.Next(membership.Change{Servers: joined}); err != nil {
			return nil, err
		}
	}
	if len(r.Gone) > 0 {
		if e, err = e.Next(membership.Change{Lose: each.Of(r.Gone, lossOf)}); err != nil {
			return nil, err
		}
	}
	if len(r.Moved) > 0 {
		if e, err = e.Next(membership.Change{Moved: MovedOf(r)}); err != nil {
			return nil, err
		}
	}
	e.Number = r.Epoch
	for _, rank := range r.Left {
		if rank < 0 || rank >= len(r.Workers) {
			return nil, fmt.Errorf("rank %d of %d has left", rank, len(r.Workers))
		}
		e.Left.Add(rank)
	}
	return e, nil
}

func lossOf(l wire.Lost) membership.Loss {
	m := membership.Member{Role: membership.WorkerRole, Number: l.Rank}
	if l.Role == wire.RoleServer {
		m.Role = membership.ServerRole
	}
	return membership.Loss{Member: m, Drained: l.Drained, Why: l.Why, Among: l.Among}
}

// MovedOf are the moves in a roster.
func MovedOf(r *wire.Roster) membership.Moved {
	return membership.MovedBy(r.Moves, each.Of(r.Moved, func(k wire.MovedKey) membership.Move {
		return membership.Move{Number: uint32(k[0]), Part: k[1], To: k[2]}
	}))
}

// RosterOf is an epoch as it travels.
func RosterOf(e *membership.Epoch) wire.Roster {
	r := wire.Roster{Round: e.Round, Epoch: e.Number, Placement: e.Policy, Elastic: e.Elastic, Workers: make([]wire.Node, len(e.Workers)), Servers: make([]wire.Node, len(e.Servers))}
	for rank, w := range e.Workers {
		r.Workers[rank] = wireNode(wire.RoleWorker, rank, w.Node)
	}
	for i, s := range e.Servers {
		if s.Rank == membership.Dedicated {
			r.Servers[i] = wireNode(wire.RoleServer, i, s.Node)
		} else {
			r.Servers[i] = wireNode(wire.RoleWorker, s.Rank, s.Node)
		}
	}
	r.Joined = len(e.Servers) - e.Founders()
	for _, d := range e.Departures() {
		l := wire.Lost{Role: wire.RoleWorker, Rank: d.Number, Drained: d.Drained, Why: d.Why}
		if d.Role == membership.ServerRole {
			l.Role = wire.RoleServer
		}
		if r.Joined > 0 {
			l.Among = d.Among
		}
		r.Gone = append(r.Gone, l)
	}
	moved := e.Moved()
	r.Moves = moved.Times()
	for _, m := range moved.All() {
		r.Moved = append(r.Moved, wire.MovedKey{int(m.Number), m.Part, m.To})
	}
	return r
}

// NodeOf is the process behind a node of a roster.
func NodeOf(n *wire.Node) membership.Node {
	return membership.Node{
		Incarnation: n.Session, Host: n.Host, PID: n.PID, Version: n.Version,
		LocalRank: n.LocalRank, LocalSize: n.LocalSize, Addresses: n.Addresses, Standby: n.Standby, HostSums: n.HostSums,
	}
}

func wireNode(role wire.Role, rank int, n membership.Node) wire.Node {
	return wire.Node{
		Role: role, Rank: rank, Session: n.Incarnation, Host: n.Host, PID: n.PID, Version: n.Version,
		LocalRank: n.LocalRank, LocalSize: n.LocalSize, Addresses: n.Addresses, Standby: n.Standby, HostSums: n.HostSums,
	}
}
