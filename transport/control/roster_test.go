package control

import (
	"reflect"
	"strings"
	"testing"

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
		"a server less":   {func(r *wire.Roster) { r.Servers = r.Servers[1:] }, "not in their order"},
	} {
		r := sampleRoster()
		c.spoil(&r)
		if e, err := EpochOf(&r); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: epoch %+v, error %v, want one with %q", name, e, err, c.want)
		}
	}
}
