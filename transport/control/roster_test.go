package control

import (
	"reflect"
	"strings"
	"testing"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/transport/wire"
)

func sampleRoster() wire.Roster {
	workers := []wire.Node{
		{Role: wire.RoleWorker, Session: 1, Host: "a", PID: 11, Addresses: address.List{{Kind: "tcp", At: "a:1"}}, Version: "1.0", LocalSize: 2},
		{Role: wire.RoleWorker, Session: 2, Host: "a", PID: 12, Version: "1.0", Rank: 1, LocalRank: 1, LocalSize: 2},
	}
	server := wire.Node{Role: wire.RoleServer, Session: 3, Host: "b", PID: 13, Addresses: address.List{{Kind: "tcp", At: "b:1"}}, Version: "1.0", Rank: 1}
	return wire.Roster{Round: 7, Epoch: 4, Placement: "round-robin", Workers: workers, Servers: []wire.Node{workers[0], server}}
}

func TestARosterIsAnEpochAndBack(t *testing.T) {
	r := sampleRoster()
	e, err := EpochOf(&r)
	if err != nil {
		t.Fatal(err)
	}
	if back := RosterOf(e); !reflect.DeepEqual(back, r) {
		t.Errorf("got %+v\nwant %+v", back, r)
	}
}

// A node that comes late, or a scheduler that was restarted, has the keys where the others have them: what server 1 had went on before server 2 came.
func TestARosterSaysWhoHasJoinedAndWhen(t *testing.T) {
	server := func(i int) membership.Node {
		return membership.Node{Incarnation: uint64(10 + i), Addresses: address.List{{Kind: "tcp", At: "c:" + string(rune('1'+i))}}}
	}
	e, err := membership.Found(7, "round-robin", []membership.Node{{Incarnation: 1}}, []membership.Node{server(1), server(0)})
	if err != nil {
		t.Fatal(err)
	}
	e.Elastic = true
	lose := func(i int) membership.Change {
		return membership.Change{Lose: []membership.Loss{{Member: membership.Member{Role: membership.ServerRole, Number: i}, Why: "gone"}}}
	}
	join := func(i int) membership.Change { return membership.Change{Servers: []membership.Node{server(i)}} }
	for _, c := range []membership.Change{join(2), lose(1), join(4), join(3), lose(2)} { // the addresses of those that join are in no order
		if e, err = e.Next(c); err != nil {
			t.Fatal(err)
		}
	}
	r := RosterOf(e)
	back, err := EpochOf(&r)
	if err != nil {
		t.Fatal(err)
	}
	if again := RosterOf(back); !reflect.DeepEqual(again, r) {
		t.Errorf("got %+v\nwant %+v", again, r)
	}
	for part := range 100 {
		name := membership.Name{Name: "x"}
		if here, there := back.Heir(membership.Key{Name: name, Part: part}, 1), e.Heir(membership.Key{Name: name, Part: part}, 1); here != there {
			t.Errorf("partition %d is on server %d, and on %d where every change was seen", part, here, there)
		}
	}
}

func TestARosterThatCannotBeIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(*wire.Roster)
		want  string
	}{
		"no round":        {func(r *wire.Roster) { r.Round = 0 }, "no number"},
		"nobody":          {func(r *wire.Roster) { r.Workers = nil }, "no worker"},
		"no server":       {func(r *wire.Roster) { r.Workers[0].Addresses, r.Servers = nil, nil }, "no server"},
		"wrong order":     {func(r *wire.Roster) { r.Workers[0], r.Workers[1] = r.Workers[1], r.Workers[0] }, "place 0 holds worker 1"},
		"not a worker":    {func(r *wire.Roster) { r.Workers[1].Role = wire.RoleServer }, "place 1 holds server 1"},
		"one node twice":  {func(r *wire.Roster) { r.Workers[1].Session = 1 }, "same process"},
		"no incarnation":  {func(r *wire.Roster) { r.Servers[1].Session = 0 }, "no incarnation"},
		"bad address":     {func(r *wire.Roster) { r.Servers[1].Addresses = make(address.List, 1) }, "server 1 has address"},
		"bad at a worker": {func(r *wire.Roster) { r.Workers[0].Addresses = make(address.List, 1) }, "worker 0 has address"},
		"servers swapped": {func(r *wire.Roster) { r.Servers[0], r.Servers[1] = r.Servers[1], r.Servers[0] }, "not in their order"},
		"joins of more":   {func(r *wire.Roster) { r.Elastic, r.Joined = true, 3 }, "3 of 2 servers have joined"},
		"joins of none":   {func(r *wire.Roster) { r.Elastic, r.Joined = true, -1 }, "-1 of 2 servers have joined"},
		"joins, static":   {func(r *wire.Roster) { r.Joined = 1 }, "(elastic: false)"},
		"a server less":   {func(r *wire.Roster) { r.Servers = r.Servers[1:] }, "not in their order"},
	} {
		r := sampleRoster()
		c.spoil(&r)
		if e, err := EpochOf(&r); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: epoch %+v, error %v, want one with %q", name, e, err, c.want)
		}
	}
}
