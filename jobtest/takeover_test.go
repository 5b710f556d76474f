package jobtest_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/jobtest"
)

// The scheduler is lost, and goes on elsewhere.

// TestASchedulerIsStartedAgainAtAnotherAddress: the one before was killed, or runs no more and keeps its connections. Training goes on, with new tensors.
func TestASchedulerIsStartedAgainAtAnotherAddress(t *testing.T) {
	t.Parallel() // its time passes without work
	for _, servers := range []int{0, 2} {
		t.Run(fmt.Sprintf("%d servers", servers), func(t *testing.T) {
			t.Parallel()
			f := jobtest.StartFleetOfTwoAddresses(t, 3, servers, "PACELINE_PEER_TIMEOUT=4s")
			for range 2 {
				f.MoveScheduler((*jobtest.Process).Kill)
				for range 3 {
					f.Steps()
				}
			}
			f.MoveScheduler((*jobtest.Process).Stop)
			for range 3 {
				f.Steps()
			}
		})
	}
}

// TestTheSchedulerGoesOnInTheLowestLiveRank: rank 0 with the scheduler in it is killed, cut off with its host, or stopped; so is the one that has taken over, at
// the same time or later. The others end well, with the bits of a run that has the same members.
func TestTheSchedulerGoesOnInTheLowestLiveRank(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]upheaval{
		"killed":                       {events: []event{{sigkill, 0, 10}}},
		"cut off":                      {events: []event{{longCut, 0, 10}}, backs: true},
		"stopped":                      {events: []event{{sigstop, 0, 10}}, backs: true},
		"two at once":                  {events: []event{{sigkill, 0, 10}, {sigkill, 1, 10}}},
		"one after the other":          {events: []event{{sigkill, 0, 10}, {sigkill, 1, 11}}},
		"all but one":                  {events: []event{{sigkill, 0, 10}, {sigkill, 1, 10}, {sigkill, 3, 10}}},
		"killed, dedicated servers":    {events: []event{{sigkill, 0, 10}}, servers: 2},
		"stopped, a server killed too": {events: []event{{sigstop, 0, 10}, {sigkill, 4, 10}}, servers: 2},
		"stopped with a server":        {events: []event{{sigstop, 0, 10}, {sigstop, 4, 10}}, servers: 2, backs: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if jobtest.CanMakeHosts() != nil && c.worst() == longCut {
				t.Skip(jobtest.CanMakeHosts())
			}
			const ranks = 4
			over := c.servers
			if over == 0 {
				over = ranks
			}
			u := &c
			u.Means, u.moves, u.apart = jobtest.NewMeans(rand.New(rand.NewPCG(1, 2)), ranks, 50000, 60, over), true, jobtest.CanMakeHosts() == nil
			u.Heirs, u.Lost = true, nil
			for _, e := range u.events {
				if e.host < ranks {
					u.Lost = append(u.Lost, e.host)
				}
			}
			longest := u.play(t)
			t.Logf("the longest steps of the survivors: %.2f s", slices.Max(longest))
		})
	}
}

func TestAJobThatIsNotElasticEndsWithTheSchedulerInRank0(t *testing.T) {
	f := jobtest.StartFleetOfWorkers(t, 3)
	f.Workers[0].Kill()
	f.Workers[0] = nil
	f.Fails("worker 0")
}

// TestOneSideOfAPartedNetworkGoesOn: that with most of the workers, whether it has the scheduler or not. The others end with an error, though they could have
// a scheduler too, in their lowest rank or at another address.
func TestOneSideOfAPartedNetworkGoesOn(t *testing.T) {
	t.Parallel()
	const ranks, servers = 5, 5
	for _, c := range []struct {
		name  string
		away  []int // from the scheduler's host
		list  bool  // schedulers at two addresses, one on each side
		pause time.Duration
	}{
		{"the scheduler's side", []int{3, 4}, false, 0},
		{"the other side", []int{2, 3, 4}, false, 0},
		{"the scheduler's side, another scheduler on the other", []int{3, 4}, true, 0},
		{"the other side, a new scheduler there", []int{2, 3, 4}, true, 0},
		{"the other side, piece by piece", []int{2, 3, 4}, false, 250 * time.Millisecond},
		{"the other side, piece by piece, a new scheduler there", []int{2, 3, 4}, true, 250 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := jobtest.MakeHosts(t, ranks)
			m := jobtest.NewMeans(rand.New(rand.NewPCG(1, 2)), ranks, 50000, 60, servers)
			m.Heirs, m.Lost = true, c.away
			if 2*len(c.away) > ranks {
				m.Lost = []int{0, 1}
			}
			env := append(m.Env(), "PACELINE_SERVERS=embedded")
			var f *jobtest.Fleet
			if c.list {
				f = h.LaunchOfTwoAddresses(ranks, 0, 0, 4, env...)
			} else {
				f = h.LaunchOfWorkers(ranks, 0, env...)
			}
			parted := false
			for rank, w := range f.Workers {
				if slices.Contains(m.Lost, rank) {
					continue
				}
				for more := true; more; {
					line, ok := w.Line()
					if !ok {
						t.Fatalf("rank %d ended without a word", rank)
					}
					longest, goesOn, err := m.Heard(rank, line)
					if err != nil {
						t.Fatal(err)
					}
					if more = goesOn; !more {
						t.Logf("the longest step of rank %d: %.2f s", rank, longest)
					}
					if !parted && len(m.Results[rank]) == 10 {
						parted = true
						if took, most := h.Part(c.pause, c.away...), 750*time.Millisecond; took > most { // a quarter of the peer timeout, which a link may be down
							t.Skipf("the first and the last did not reach each other for %v, %v at most: one may have given the other up", took, most)
						}
						if c.list {
							f.MoveScheduler(func(*jobtest.Process) {}) // both run
						}
					}
				}
			}
			if err := m.Check(); err != nil {
				t.Error(err)
			}
			for _, rank := range m.Lost {
				if err := f.Workers[rank].Failure(); !strings.Contains(err, "the job cannot go on here") {
					t.Errorf("rank %d, on the smaller side, ends with %q", rank, err)
				}
			}
		})
	}
}
