package jobtest_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/transporttest"
)

// carried plays an elastic job in virtual time whose workers carry its servers. fault writes what happens to the network.
func carried(t *testing.T, ranks int, play func(t *testing.T, j *jobtest.Job, fault func(script string))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 3 * time.Second})
		t.Cleanup(network.Close)
		j := jobtest.Start(t, ranks, jobtest.Elastic, jobtest.SmallPartitions, jobtest.Transports(func(rank int) *transport.Set {
			return transport.NewSet(nil, network.Node(nodeName(rank), []byte(jobtest.Secret)))
		}))
		var stopped []string
		fault := func(script string) {
			if err := network.Script(script); err != nil {
				t.Error(err)
			}
			for line := range strings.Lines(script) {
				if node, stops := strings.CutSuffix(strings.TrimPrefix(line, "at 0s "), " stop\n"); stops {
					stopped = append(stopped, node)
				}
			}
		}
		t.Cleanup(func() {
			for _, node := range stopped {
				fault(fmt.Sprintf("at 0s %s continue\n", node))
			}
		})
		play(t, j, fault)
	})
}

// killed is a script in which a rank ends as by SIGKILL.
func killed(ranks, rank int) string {
	script := fmt.Sprintf("at 0s %s stop\nat 0s %s<->servers reset\n", nodeName(rank), nodeName(rank))
	for other := range ranks {
		if other != rank {
			script += fmt.Sprintf("at 0s %s<->%s reset\n", nodeName(rank), nodeName(other))
		}
	}
	return script
}

// TestAnElasticJobGoesOnWithoutAWorkerAndTheServerInIt: one after the other and at once, until one is left; within a second, each sum with the same bits everywhere.
func TestAnElasticJobGoesOnWithoutAWorkerAndTheServerInIt(t *testing.T) {
	const ranks, n = 4, 7 * jobtest.Partition
	for name, order := range map[string][][]int{"one after the other": {{1}, {0}, {3}}, "two at once": {{0, 2}, {1}}, "all but one": {{0, 1, 3}}} {
		t.Run(name, func(t *testing.T) {
			carried(t, ranks, func(t *testing.T, j *jobtest.Job, fault func(string)) {
				live := j.All().Ranks
				sum := func(name string, want int, before func()) {
					t.Helper()
					for rank, err := range j.Outcomes(func(rank int) error {
						if !slices.Contains(live, rank) {
							return nil
						}
						if rank == live[len(live)-1] { // the others wait for it in the middle of the operation
							time.Sleep(10 * time.Millisecond)
							before()
						}
						began := time.Now()
						err := sumsTo(j, rank, name, n, byte(want))
						if took := time.Since(began); took > time.Second {
							t.Errorf("rank %d: %q took %v", rank, name, took)
						}
						return err
					}) {
						if err != nil {
							t.Errorf("rank %d: %v", rank, err)
						}
					}
				}
				sum("x", len(live), func() {})
				for i, gone := range order {
					live = slices.DeleteFunc(live, func(rank int) bool { return slices.Contains(gone, rank) })
					sum("x", len(live), func() {
						var script string
						for _, rank := range gone {
							script += killed(ranks, rank)
						}
						fault(script)
					})
					sum("x", len(live), func() {})
					sum(fmt.Sprint("new ", i), len(live), func() {})
				}
			})
		})
	}
}

// A rank that ends its script early stays as a server, and may be lost then.
func TestTheServerOfARankThatHasLeftStays(t *testing.T) {
	const n = 7 * jobtest.Partition
	for _, dies := range []bool{false, true} {
		carried(t, 3, func(t *testing.T, j *jobtest.Job, fault func(string)) {
			j.Works("x", n)
			left := j.Leave(2)
			for i := range 20 {
				j.Each(func(rank int) error { return sumsTo(j, rank, "x", n, 2) })
				j.Each(func(rank int) error { return sumsTo(j, rank, fmt.Sprint("new ", i), n, 2) })
				if i == 10 && dies {
					fault(killed(3, 2))
				}
				time.Sleep(10 * time.Second)
			}
			select {
			case <-left:
				t.Error("its server has gone before the others have left")
			default:
			}
			first, last := j.Leave(0), j.Leave(1)
			<-first
			<-last
			if !dies {
				<-left
			}
		})
	}
}

// TestTwoRanksThatCannotReachEachOther: the job goes on without one of them, and without the one that nobody reaches.
func TestTwoRanksThatCannotReachEachOther(t *testing.T) {
	const ranks, n = 4, 7 * jobtest.Partition
	for name, c := range map[string]struct {
		cut  [][2]int
		gone [][]int // who may be
	}{
		"one link":           {[][2]int{{1, 2}}, [][]int{{1}, {2}}},
		"one from all":       {[][2]int{{1, 0}, {1, 2}, {1, 3}}, [][]int{{1}}},
		"the first from all": {[][2]int{{0, 1}, {0, 2}, {0, 3}}, [][]int{{0}}},
	} {
		t.Run(name, func(t *testing.T) {
			carried(t, ranks, func(t *testing.T, j *jobtest.Job, fault func(string)) {
				j.Works("x", n)
				var script string
				for _, pair := range c.cut {
					script += fmt.Sprintf("at 0s %s<->%s cut\n", nodeName(pair[0]), nodeName(pair[1]))
				}
				fault(script)
				sums := make([]byte, ranks)
				var gone []int
				for rank, err := range j.Outcomes(func(rank int) error {
					op := jobtest.Sum("x", n)
					for range 3 {
						if _, err := j.Do(rank, op); err != nil {
							return err
						}
						sums[rank] = op.Output[0]
						op = jobtest.Sum("x", n)
					}
					return nil
				}) {
					if err != nil {
						gone = append(gone, rank)
					}
				}
				if !slices.ContainsFunc(c.gone, func(may []int) bool { return slices.Equal(may, gone) }) {
					t.Errorf("ranks %v have gone, want one of %v", gone, c.gone)
				}
				for rank, sum := range sums {
					if !slices.Contains(gone, rank) && sum != byte(ranks-len(gone)) {
						t.Errorf("rank %d has %d", rank, sum)
					}
				}
			})
		})
	}
}

// TestAllKindsGoOnWithoutAWorkerAndTheServerInIt: held values with supersteps too.
func TestAllKindsGoOnWithoutAWorkerAndTheServerInIt(t *testing.T) {
	carried(t, 3, func(t *testing.T, j *jobtest.Job, fault func(string)) {
		values := make([]*jobtest.Group, 3)
		j.Each(func(rank int) (err error) {
			values[rank], err = j.Group(rank, "v", "adaptive:1,1", 2, 100000)
			return err
		})
		fault(killed(3, 2))
		j.Leave(2) // it plays no part any more
		j.Each(func(rank int) error { return values[rank].Step(1) })
		j.Each(func(rank int) error {
			v, err := j.Declare(rank, "another", "bsp", 50000)
			if err == nil {
				err = v.Use(units.Add|units.Read, 1)
			}
			return err
		})
		j.Each(func(rank int) error {
			if _, err := j.Do(rank, jobtest.Float32s(units.Broadcast, "b", 50000)); err != nil {
				return err
			}
			out, err := j.Do(rank, jobtest.Float32s(units.Allgather, "g", int64(rank)+1, 2))
			if got := fmt.Sprint(out.Rows); err == nil && got != "[1 2 0]" {
				err = fmt.Errorf("allgather brought %s", got)
			}
			return err
		})
		j.Each(func(rank int) error { _, err := j.Join(rank); return err })
		j.Each(func(rank int) error { return sumsTo(j, rank, "x", 100000, 2) })
	})
}

// TestABroadcastGoesOnWithoutItsRootWhereOneHasIt: the root is lost with the server in its process, which is the operation's home and has answered one rank, and not the other.
func TestABroadcastGoesOnWithoutItsRootWhereOneHasIt(t *testing.T) {
	for i := range 10 {
		carried(t, 3, func(t *testing.T, j *jobtest.Job, fault func(string)) {
			cast := func(rank int) error {
				op := jobtest.Float32s(units.Broadcast, fmt.Sprint("b", i), 100)
				if rank > 0 {
					clear(op.Output)
				}
				_, err := j.Do(rank, op)
				if err == nil && jobtest.Numbers(units.Float32, op.Output)[99] != 1 {
					err = errors.New("it has other bytes")
				}
				return err
			}
			j.Each(cast)
			fault("at 0s worker0->worker1 freeze\n")
			for rank, err := range j.Outcomes(func(rank int) error {
				if rank > 0 {
					return cast(rank)
				}
				done := make(chan error, 1)
				go func() { done <- cast(rank) }()
				time.Sleep(20 * time.Millisecond) // of virtual time: rank 2 has its answer
				fault(killed(3, 0))
				return <-done
			})[1:] {
				if err != nil {
					t.Errorf("rank %d: %v", rank+1, err)
				}
			}
			j.Leave(0)
		})
	}
}
