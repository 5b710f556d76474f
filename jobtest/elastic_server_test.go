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
	"github.com/paceline/paceline/worker"
)

// served plays an elastic job in virtual time. kill ends all connections of a dedicated server at once, as SIGKILL does.
func served(t *testing.T, ranks, servers int, play func(t *testing.T, j *jobtest.Job, kill func(i int))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 3 * time.Second})
		t.Cleanup(network.Close)
		j := jobtest.Start(t, ranks, jobtest.Dedicated(servers), jobtest.Elastic, jobtest.SmallPartitions, eachOn(network))
		revived(t, network, servers)
		play(t, j, func(i int) {
			if err := network.Script(fmt.Sprintf("at 0s %s stop\n", serverName(i)) + cutOff(ranks, i, 0, "reset")); err != nil {
				t.Error(err)
			}
		})
	})
}

func serverName(i int) string { return fmt.Sprint("server", i) }

// eachOn has each worker and each dedicated server be a node of its own in a network.
func eachOn(network *transporttest.Network) jobtest.Option {
	named := func(name string) *transport.Set {
		return transport.NewSet(nil, network.Node(name, []byte(jobtest.Secret)))
	}
	return func(j *jobtest.Job) {
		jobtest.Transports(func(rank int) *transport.Set { return named(nodeName(rank)) })(j)
		jobtest.ServerTransports(func(i int) *transport.Set { return named(serverName(i)) })(j)
	}
}

// revived has the servers that a test has stopped go on at its end.
func revived(t *testing.T, network *transporttest.Network, servers int) {
	t.Cleanup(func() {
		for i := range servers {
			if err := network.Script(fmt.Sprintf("at 0s %s continue", serverName(i))); err != nil {
				t.Error(err)
			}
		}
	})
}

// cutOff is a script in which something happens to all connections of a server.
func cutOff(ranks, server int, at time.Duration, what string) string {
	var script strings.Builder
	for rank := range ranks {
		fmt.Fprintf(&script, "at %v %s<->%s %s\n", at, nodeName(rank), serverName(server), what)
	}
	fmt.Fprintf(&script, "at %v %s<->servers %s\n", at, serverName(server), what)
	return script.String()
}

// rankCutOff is cutOff of all connections of a rank of a job with dedicated servers.
func rankCutOff(rank, servers int, at time.Duration, what string) string {
	script := fmt.Sprintf("at %v %s<->servers %s\n", at, nodeName(rank), what)
	for i := range servers {
		script += fmt.Sprintf("at %v %s<->%s %s\n", at, nodeName(rank), serverName(i), what)
	}
	return script
}

// TestAnElasticJobGoesOnWithoutALostServer: operations that are in flight then, and all that follow.
func TestAnElasticJobGoesOnWithoutALostServer(t *testing.T) {
	const n = 7 * jobtest.Partition
	for _, c := range []struct {
		name string
		lost []int
	}{{"the first of two", []int{0}}, {"one of three", []int{1}}, {"one after the other", []int{2, 0}}} {
		t.Run(c.name, func(t *testing.T) {
			served(t, 3, len(c.lost)+1, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
				for round, i := range c.lost {
					for between := range 2 {
						name := fmt.Sprint("x", between)
						j.Works(name, n)
						j.Each(func(rank int) error {
							if rank == 2 { // which brings its part when the server has gone
								if between == 1 {
									kill(i)
								}
								time.Sleep(10 * time.Millisecond)
								start := time.Now()
								defer func() {
									if took := time.Since(start); took > time.Second {
										t.Errorf("%v after the loss", took)
									}
								}()
							}
							return j.Sums(rank, name, n)
						})
					}
					j.Works(fmt.Sprint("new ", round), n)
					works(j)
				}
			})
		})
	}
}

// TestALossThatNoSchedulerDecidesNamesTheMissingScheduler: where none is started again in time, each rank ends, as it says.
func TestALossThatNoSchedulerDecidesNamesTheMissingScheduler(t *testing.T) {
	served(t, 2, 2, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
		const n = 7 * jobtest.Partition
		j.Works("x", n)
		j.Scheduler.Close()
		kill(0)
		start := time.Now()
		for rank, err := range j.Outcomes(func(rank int) error { return j.Sums(rank, "x", n) }) {
			for _, want := range []string{"server 0", "that the job goes on without it has not been heard in 20s", "the scheduler at " + j.Scheduler.Address + ", to which there has been no line for 20"} {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("rank %d: %v, want %q", rank, err, want)
				}
			}
		}
		if took := time.Since(start); took > 22*time.Second {
			t.Errorf("after %v", took)
		}
	})
}

// TestAnAllgatherGoesOnWithoutTheOnlyRankThatHadItsSizes: that rank, and the server that has them, are lost at once, after it has brought rows. The others
// sum the sizes anew, without it, and find its rows at other servers.
func TestAnAllgatherGoesOnWithoutTheOnlyRankThatHadItsSizes(t *testing.T) {
	const ranks, servers = 4, 3
	for lost := range servers {
		for _, rows := range []int64{1, 40} { // of the lost rank: as many as the others, or so many that it uses more partitions
			synctest.Test(t, func(t *testing.T) {
				network := transporttest.NewNetwork(transporttest.Options{PeerTimeout: 3 * time.Second})
				t.Cleanup(network.Close)
				j := jobtest.Start(t, ranks, jobtest.Dedicated(servers), jobtest.Elastic, jobtest.SmallPartitions, eachOn(network))
				revived(t, network, servers)
				happen := func(script string) {
					if err := network.Script(script); err != nil {
						t.Error(err)
					}
				}
				t.Cleanup(func() { happen("at 0s worker0 continue\n") })
				gather := func(rank int, want string) error {
					n := int64(1)
					if rank == 0 {
						n = rows
					}
					out, err := j.Do(rank, jobtest.Float32s(units.Allgather, "g", n, 5000))
					if got := fmt.Sprint(out.Rows); err == nil && got != want {
						err = fmt.Errorf("rows %s, want %s", got, want)
					}
					return err
				}
				whole := fmt.Sprint([]int64{rows, 1, 1, 1})
				j.Each(func(rank int) error { return gather(rank, whole) })
				for rank := 1; rank < ranks; rank++ {
					happen(fmt.Sprintf("at 0s server%d->%s freeze\n", lost, nodeName(rank)))
				}
				for rank, err := range j.Outcomes(func(rank int) error {
					if rank == 0 {
						go func() {
							time.Sleep(20 * time.Millisecond) // of virtual time: it has brought its rows
							happen("at 0s worker0 stop\n" + rankCutOff(0, servers, 0, "reset") + fmt.Sprintf("at 0s %s stop\n", serverName(lost)) + cutOff(ranks, lost, 0, "reset"))
						}()
						return gather(rank, whole)
					}
					out, err := j.Do(rank, jobtest.Float32s(units.Allgather, "g", 1, 5000))
					if got := fmt.Sprint(out.Rows); err == nil && got != whole && got != "[0 1 1 1]" {
						err = fmt.Errorf("rows %s", got)
					}
					for range 3 {
						if err == nil {
							err = gather(rank, "[0 1 1 1]")
						}
					}
					return err
				})[1:] {
					if err != nil {
						t.Errorf("server %d and a rank with %d rows lost: rank %d: %v", lost, rows, rank+1, err)
					}
				}
			})
		}
	}
}

// works has all ranks do operations of every kind.
func works(j *jobtest.Job) {
	j.T.Helper()
	ranks := int64(len(j.Workers))
	j.Each(func(rank int) error {
		for _, op := range []worker.Op{
			jobtest.Float32s(units.Allreduce, "mean", 50000), jobtest.Float32s(units.Broadcast, "b", 50000), jobtest.Float32s(units.Allgather, "g", int64(rank)+1, 20000),
			jobtest.Float32s(units.Alltoall, "a", ranks, 30000), jobtest.Float32s(units.Reducescatter, "r", ranks, 30000), jobtest.Float32s(units.Barrier, "w"),
		} {
			switch op.Kind {
			case units.Allreduce:
				op.ReduceOp = units.Average
			case units.Reducescatter:
				op.Output = make([]byte, 4*30000)
			case units.Barrier:
				op.Input = nil
			}
			out, err := j.Do(rank, op)
			if err != nil {
				return err
			}
			want := float32(1)
			if op.Kind == units.Reducescatter {
				want = float32(ranks)
			}
			for i, v := range jobtest.Numbers(units.Float32, slices.Concat(op.Output, out.Data)) {
				if v != float64(want) {
					return fmt.Errorf("element %d of %q is %v, want %v", i, op.Name, v, want)
				}
			}
		}
		return nil
	})
}

// TestSuperstepsGoOnWithoutTheServerThatDecides: the server is lost in the middle of a superstep, in which one rank has asked it whether to go on.
func TestSuperstepsGoOnWithoutTheServerThatDecides(t *testing.T) {
	for _, model := range []string{"adaptive:1,1", "adaptive:3,2", "elastic:2"} {
		t.Run(model, func(t *testing.T) {
			served(t, 3, 2, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
				const steps = 30
				j.Each(func(rank int) error {
					g, err := j.Group(rank, "v", model, 2, 50000)
					for i := 0; i < steps && err == nil; i++ {
						if i == 10 && rank == 0 { // the others have gone on as far as they may
							time.Sleep(10 * time.Millisecond)
							kill(0)
						}
						err = g.Step(1)
					}
					if err == nil {
						err = j.Sums(rank, "all have added", 5)
					}
					for _, v := range g.Values {
						if err == nil {
							err = v.Use(units.ReadNow, 0)
						}
						if err == nil {
							err = v.Is(10 + 3*steps)
						}
					}
					return err
				})
				works(j)
			})
		})
	}
}

// TestAValueThatNobodyCanReadIsRefused when it is declared: it could not go on without its server.
func TestAValueThatNobodyCanReadIsRefused(t *testing.T) {
	served(t, 2, 2, func(t *testing.T, j *jobtest.Job, _ func(i int)) {
		for rank := range 2 {
			op := j.Held(rank, "v", "ssp:2", 5).Op(units.Declare, 1)
			op.Prescale, op.Postscale = 1, 0
			if _, err := j.Do(rank, op); !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "postscale of 0") {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
		works(j)
	})
}

// The loss of the last server is one error on every rank.
func TestTheLossOfTheLastServerEndsAnElasticJob(t *testing.T) {
	served(t, 3, 2, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
		kill(1)
		j.Works("x", 100)
		kill(0)
		for rank, err := range j.Outcomes(func(rank int) error { return j.Sums(rank, "x", 100) }) {
			if !errors.Is(err, worker.ErrPeerLost) || !strings.Contains(err.Error(), "server 0") || !strings.Contains(err.Error(), "no server left") {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
	})
}

// A server that is told to end in the middle of a job holds nobody either.
func TestAServerThatIsStoppedHoldsNobody(t *testing.T) {
	served(t, 3, 3, func(_ *testing.T, j *jobtest.Job, _ func(i int)) {
		j.Works("x", 300000)
		for i := range 2 {
			j.Each(func(rank int) error {
				if rank == i {
					j.StopServer(i)
				}
				return j.Sums(rank, "x", 300000)
			})
		}
		works(j)
	})
}

// Ranks that wait in a join wait for a lost server no longer.
func TestALostServerEndsNoJoin(t *testing.T) {
	served(t, 3, 2, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
		j.Works("x", 300000)
		j.Each(func(rank int) error {
			if rank == 2 {
				kill(0)
				time.Sleep(20 * time.Millisecond)
			}
			last, err := j.Join(rank)
			if err == nil && last != 2 {
				err = fmt.Errorf("the last to join was %d", last)
			}
			return err
		})
		j.Works("x", 300000)
	})
}

// TestCodedSumsGoOnWithoutALostServer: all ranks have the same bits, and near to what they should be.
func TestCodedSumsGoOnWithoutALostServer(t *testing.T) {
	served(t, 3, 3, func(t *testing.T, j *jobtest.Job, kill func(i int)) {
		for step := range 6 {
			var got [3][]byte
			j.Each(func(rank int) error {
				op := jobtest.Float32s(units.Allreduce, "x", 100000)
				op.Codec = "int8"
				if rank == 2 && step%2 == 1 {
					kill(step / 2)
				}
				_, err := j.Do(rank, op)
				got[rank] = op.Output
				return err
			})
			if !slices.Equal(got[0], got[1]) || !slices.Equal(got[0], got[2]) {
				t.Fatalf("step %d: the ranks differ", step)
			}
			if v := jobtest.Numbers(units.Float32, got[0])[99999]; v < 2.9 || v > 3.1 {
				t.Fatalf("step %d: %v", step, v)
			}
			if step == 3 {
				return // one is left
			}
		}
	})
}
