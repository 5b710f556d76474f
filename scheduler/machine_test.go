package scheduler

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/address"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

func TestARosterThatCannotBeIsRefused(t *testing.T) {
	n := []wire.Node{{Role: wire.RoleWorker, Session: 1, Addresses: address.List{{Kind: "tcp", At: "h:1"}}}, {Role: wire.RoleWorker, Rank: 1, Session: 2}}
	for name, r := range map[string]wire.Roster{
		"no round":  {Workers: n, Servers: n[:1]},
		"no server": {Round: 1, Workers: n},
		"placement": {Round: 1, Workers: n, Servers: n[:1], Placement: "nowhere"},
	} {
		m := NewMachine(Settings{})
		m.Step(Input{Line: 1, Hello: &wire.Hello{Role: wire.RoleWorker}})
		out := m.Step(Input{Line: 1, Message: &wire.Control{ID: 1, Register: &wire.Register{
			Node: wire.Node{Role: wire.RoleWorker, Session: 1}, Known: &wire.Known{Roster: r},
		}}})
		if len(out) != 1 || !strings.Contains(out[0].Message.Error, "bad roster") || len(m.rounds) > 0 {
			t.Errorf("%s: %+v", name, out)
		}
	}
}

// bigJob registers n workers.
func bigJob(t testing.TB, n int) *Machine {
	m := NewMachine(Settings{FirstRound: 1})
	got := 0
	for rank := range n {
		line := Line(rank + 1)
		m.Step(Input{Line: line, Hello: &wire.Hello{Role: wire.RoleWorker, Rank: rank}})
		for _, o := range m.Step(Input{Line: line, Message: &wire.Control{ID: 1, Wait: 60, Register: &wire.Register{
			Workers: n, Node: wire.Node{Role: wire.RoleWorker, Rank: rank, Session: uint64(rank + 1), Addresses: address.List{{Kind: "tcp", At: fmt.Sprint("h:", rank)}}},
		}}}) {
			if o.Message != nil && o.Message.Roster != nil {
				got++
			}
		}
	}
	if got != n {
		t.Fatalf("%d of %d workers got a roster", got, n)
	}
	return m
}

func TestThousandsOfWorkersFormARound(t *testing.T) {
	start := time.Now()
	m := bigJob(t, 4000)
	if at, ok := m.Deadline(); ok { // the deadline of the first, which has passed by then
		m.Step(Input{Now: at})
	}
	if at, ok := m.Deadline(); ok {
		t.Errorf("a round that runs well has a deadline at %v", at)
	}
	t.Logf("4,000 workers: %v", time.Since(start))
}

// A number that leaves no room for later ones is ignored, so that a later tensor gets a number of its own.
func TestNumbersThatLeaveNoneForOthersAreNotLearned(t *testing.T) {
	m := bigJob(t, 1)
	r := m.rounds[0]
	tensor := wire.Tensor{Name: "x", Kind: units.Allreduce, Op: units.Sum, DType: units.Uint8, Ranks: []int{0}, Parts: []uint32{8}}
	m.learn(r, &wire.Known{
		Tensors: []wire.Tensor{tensor}, Placed: []wire.Placed{{ID: math.MaxUint32, Servers: []int{0}}},
		Sets: []wire.ProcessSet{{ID: math.MaxUint32, Ranks: []int{0}}},
	})
	for range 2 {
		placed, err := r.tensors.declare([]wire.Tensor{tensor})
		if err != nil || placed[0].ID != 1 {
			t.Fatalf("placed %+v, error %v, want number 1", placed, err)
		}
	}
	if r.sets.next != 1 {
		t.Errorf("the next set has number %d, want 1", r.sets.next)
	}
	for last, next := range map[uint32]uint32{math.MaxUint32: 1, 4: 5} { // of sets that were removed
		m.learn(r, &wire.Known{LastSet: last})
		if r.sets.next < next || last > limits.MaxNumber && r.sets.next > 5 {
			t.Errorf("after set %d the next one has number %d", last, r.sets.next)
		}
	}
	r.tensors.last = limits.MaxNumber
	tensor.Name = "y"
	if _, err := r.tensors.declare([]wire.Tensor{tensor}); err == nil || !strings.Contains(err.Error(), "used up the numbers") {
		t.Errorf("error %v, want one about the numbers", err)
	}
}

// TestAJobThatNamesTensorsAnewHearsOfThatOnce, long before it ends at the limit.
func TestAJobThatNamesTensorsAnewHearsOfThatOnce(t *testing.T) {
	m := bigJob(t, 1)
	for batch, want := range []int{0, 1, 0} {
		all := make([]wire.Tensor, limits.ManyTensors*2/3)
		for i := range all {
			all[i] = wire.Tensor{Name: fmt.Sprint("loss.", batch, ".", i), Kind: units.Allreduce, Op: units.Sum, DType: units.Float32, Prescale: 1, Postscale: 1, Shape: []int64{1}, Parts: []uint32{4}, Ranks: []int{0}}
		}
		warned := 0
		for _, o := range m.Step(Input{Line: 1, Message: &wire.Control{ID: uint64(batch + 2), Declare: all}}) {
			if o.Message != nil && o.Message.Error != "" {
				t.Fatal(o.Message.Error)
			}
			if o.Warn && strings.Contains(o.Log, all[len(all)-1].Name) {
				warned++
			}
		}
		if warned != want {
			t.Errorf("batch %d: %d warnings, want %d", batch, warned, want)
		}
	}
}

// TestAServerThatAsksAgainToLeaveWaitsOnce: it has given up the request before, and an answer to that would come to nobody.
func TestAServerThatAsksAgainToLeaveWaitsOnce(t *testing.T) {
	s := newStage()
	for _, line := range []string{
		"s0 register server h:1", "s1 register server h:2", "s2 register server h:3", "w0 register worker 0 of=1 dedicated=3 elastic=1", "s0 drain", "s1 drain", "s1 drain",
	} {
		if err := s.act(strings.Fields(line)); err != nil {
			t.Fatal(err)
		}
	}
	if exits := s.machine.exits; len(exits) != 1 || exits[0].msg.ID != s.lastID {
		t.Errorf("%+v wait, want the last request", exits)
	}
}
