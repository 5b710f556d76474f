package jobtest_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
)

// TestTheStatusSaysHowFarEachRankIsAndWhoIsWaitedFor: two ranks are in an iteration whose third rank has not come.
func TestTheStatusSaysHowFarEachRankIsAndWhoIsWaitedFor(t *testing.T) {
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "both": jobtest.Both(1)} {
		t.Run(place, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				const size, metric, before = 30000, 300, 5
				j := jobtest.Start(t, 3, network, jobtest.SmallPartitions, option)
				for range before {
					j.Works("gradient", size)
					j.Works("", metric) // twice in each step, and moves less
					j.Works("", metric)
				}
				var waiting []chan jobtest.Result
				submit := func(rank int) {
					w, err := j.Submit(rank, jobtest.Sum("gradient", size))
					if err != nil {
						t.Fatal(err)
					}
					waiting = append(waiting, w...)
				}
				submit(0)
				submit(1)
				synctest.Wait()
				time.Sleep(300 * time.Millisecond)
				s := status(t, j)
				for rank, want := range []uint64{before + 1, before + 1, before} {
					n := s.Nodes[rank]
					if p := n.Progress; n.Rank != rank || n.State != "" || p == nil || p.Iteration != want || p.Tensor != "gradient" || p.InFlight != int(want)-before ||
						p.Operations != 3*before || p.Bytes != before*(size+2*metric) || p.Sent == 0 {
						t.Errorf("rank %d: %+v %+v", rank, n, n.Progress)
					}
				}
				var keys, bytes, served uint64
				for _, share := range s.Shares {
					keys, bytes = keys+uint64(share.Keys), bytes+share.Bytes
				}
				for _, n := range s.Nodes {
					served += n.Progress.Served
				}
				if pushes := uint64(3*before+2) * size; keys == 0 || bytes < size || served < pushes+3*before*2*metric {
					t.Errorf("%d bytes of %d keys on the servers, which have taken in %d bytes", bytes, keys, served)
				}
				if servers := len(s.Nodes) - 3; servers != j.Settings.NumServers {
					t.Errorf("%d servers: %+v", servers, s.Nodes)
				}
				wantWait(t, s, "gradient", 300*time.Millisecond, 2)
				submit(2)
				for i, w := range waiting {
					if _, err := jobtest.Await(w, i, "gradient"); err != nil {
						t.Fatal(err)
					}
				}
				if s := status(t, j); len(waitsOf(s)) > 0 {
					t.Errorf("nobody waits, and it says %+v", waitsOf(s))
				}
			})
		})
	}
}

// TestUnnamedOperationsHaveIterations too: those that are alike are one tensor, beside which a broadcast at the beginning counts for little.
func TestUnnamedOperationsHaveIterations(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		const iterations = 7
		j := jobtest.Start(t, 2, network)
		j.Works("parameters", 30000)
		for range iterations {
			j.Works("", 30000)
			j.Works("", 20000)
			j.Works("", 4)
		}
		for rank, n := range status(t, j).Nodes {
			if p := n.Progress; p == nil || p.Iteration != iterations || p.Tensor != "allreduce.noname" {
				t.Errorf("rank %d: %+v", rank, n.Progress)
			}
		}
	})
}

// TestTheStatusNamesWhomAHeldValueWaitsFor: under ssp:1 a rank may be one iteration ahead.
func TestTheStatusNamesWhomAHeldValueWaitsFor(t *testing.T) {
	jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
		j := jobtest.Start(t, 2, network)
		values := make([]*jobtest.Held, 2)
		j.Each(func(rank int) (err error) {
			values[rank], err = j.Declare(rank, "weights", "ssp:1", 100)
			return err
		})
		var last chan jobtest.Result
		for range 2 {
			w, err := j.Submit(0, values[0].Op(units.Add|units.Read, 1))
			if err != nil {
				t.Fatal(err)
			}
			last = w[0]
			synctest.Wait()
		}
		time.Sleep(2 * time.Second)
		s := status(t, j)
		wantWait(t, s, "weights", 2*time.Second, 1)
		if a, b := s.Nodes[0].Progress.Iteration, s.Nodes[1].Progress.Iteration; a != 2 || b != 0 {
			t.Errorf("iterations %d and %d", a, b)
		}
		for range 2 {
			if err := values[1].Use(units.Add|units.Read, 1); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := jobtest.Await(last, 0, "weights"); err != nil {
			t.Fatal(err)
		}
	})
}

func status(t *testing.T, j *jobtest.Job) wire.StatusReply {
	t.Helper()
	s, err := j.Workers[0].Control.Status(t.Context())
	if err != nil || len(s.Nodes) < len(j.Workers) {
		t.Fatalf("%+v, %v", s, err)
	}
	return s
}

func waitsOf(s wire.StatusReply) (all []wire.Stall) {
	for _, n := range s.Nodes {
		if n.Progress != nil {
			all = append(all, n.Progress.Waits...)
		}
	}
	return all
}

// wantWait checks that one server names the tensor that waits, since when and for whom.
func wantWait(t *testing.T, s wire.StatusReply, name string, since time.Duration, missing ...int) {
	t.Helper()
	all := waitsOf(s)
	if len(all) != 1 || all[0].Name != name || !slices.Equal(all[0].Missing, missing) || all[0].Seconds < since.Seconds() || all[0].Seconds > since.Seconds()+1 {
		t.Error(fmt.Sprintf("%q waits for %v since %v, and the status says", name, missing, since), all)
	}
}
