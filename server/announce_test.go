package server

import (
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/condition"
	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/server/room"
	"github.com/paceline/paceline/transport/wire"
)

// noUplink takes no sums.
type noUplink struct{}

func (noUplink) Open(*wire.Tensor) room.Climbs { return nil }
func (noUplink) Kick()                         {}

// announced is a round of three ranks and two servers, and a tensor of it. The ranks may be on one host, for which this server sums.
func announced(t *testing.T, host bool) (*round, wire.Tensor) {
	c := Config{Log: zap.NewNop(), Memory: 1 << 20, Model: condition.BSP()}
	if host {
		c.Host = &Host{Uplink: noUplink{}}
	}
	s := New(c)
	t.Cleanup(s.Close)
	epoch := &membership.Epoch{Round: 7, Workers: make([]membership.Worker, 3), Servers: make([]membership.Server, 2)}
	for i := range epoch.Workers {
		epoch.Workers[i].HostSums = true
	}
	for i := range epoch.Servers {
		epoch.Servers[i] = membership.Server{Rank: membership.Dedicated, Node: membership.Node{Host: "another"}}
	}
	s.Begin(epoch)
	w := declared(1, "w", units.Allreduce, units.Sum, units.Float32, 1<<14, 1<<14)
	w.Prescale, w.Postscale, w.Servers = 1, 1, []int{0, 1}
	return s.running(), w
}

// A server that sums for its host hands sums on where a rank has said that their keys are, in the name of all.
func TestAHostSumGoesToAServerOfTheJob(t *testing.T) {
	r, w := announced(t, true)
	wrong := w
	wrong.Servers = []int{0, 2}
	if err := r.announce(&wrong); err == nil {
		t.Error("a partition is on a server that the job does not have")
	}
	if err := r.announce(&w); err != nil {
		t.Errorf("the right announcement behind a wrong one: %v", err)
	}
	if r, _ := announced(t, false); r.announce(&wrong) != nil {
		t.Error("a server that hands nothing on refuses it, too")
	}
}

// What ranks have from the scheduler is the same on all; but they say where partitions lie only where their own host sums first.
func TestAnnouncementsOfATensorAgree(t *testing.T) {
	for what, c := range map[string]struct {
		change    func(w *wire.Tensor)
		job, host bool // whether it is refused by a server of the job, and by one that sums for its host
	}{
		"the same":      {change: func(*wire.Tensor) {}},
		"other ranks":   {func(w *wire.Tensor) { w.Ranks = []int{0, 1} }, true, true},
		"other cuts":    {func(w *wire.Tensor) { w.Parts = []uint32{1 << 13, 3 << 13} }, true, true},
		"other servers": {func(w *wire.Tensor) { w.Servers = []int{1, 0} }, false, true},
		"no servers":    {func(w *wire.Tensor) { w.Servers = nil }, false, true},
	} {
		for _, host := range []bool{false, true} {
			r, w := announced(t, host)
			again := w
			again.Ranks, again.Parts, again.Servers = slices.Clone(w.Ranks), slices.Clone(w.Parts), slices.Clone(w.Servers)
			c.change(&again)
			if err := r.announce(&w); err != nil {
				t.Fatal(err)
			}
			if err, refused := r.announce(&again), host && c.host || !host && c.job; (err != nil) != refused {
				t.Errorf("%s, sums of a host %v: %v", what, host, err)
			}
		}
	}
}
