package jobtest_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

var (
	moves    = flag.Int("moves", seeds(8), "how many seeds TestHeldValuesMoveWithNothingLost runs")
	moveSeed = flag.Uint64("move", 0, "the first of them: a seed that failed")

	stateMoves    = flag.Int("statemoves", seeds(8), "how many seeds TestStatesHaveAllResidualsWhateverMoves runs")
	stateMoveSeed = flag.Uint64("statemove", 0, "the first of them: a seed that failed")
)

// movers has the job's dedicated servers note what they say.
func movers(into **observer.ObservedLogs) jobtest.Option {
	return func(j *jobtest.Job) {
		core, logs := observer.New(zap.InfoLevel)
		j.ServerLog, *into = zap.New(core), logs
	}
}

// given is how many partitions of held values have been given away.
func given(logs *observer.ObservedLogs) int {
	return logs.FilterMessage("a held value goes on at another server").Len()
}

// TestHeldValuesMoveWithNothingLost plays jobs whose ranks add to a value of many partitions and read it, while servers join, leave and turn out to be slow, and so partitions
// move, also while they move. Every rank finds all that it has added itself, once, in whatever it reads, and never less than before; in the end what all have added.
func TestHeldValuesMoveWithNothingLost(t *testing.T) {
	all := 0
	for seed := *moveSeed; seed < *moveSeed+uint64(*moves); seed++ {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { all += playMoves(t, seed) })
			if t.Failed() {
				t.Logf("again: go test -tags invariants ./jobtest -run TestHeldValuesMoveWith -move %d -moves 1", seed)
			}
		})
	}
	if t.Logf("%d partitions moved", all); all < *moves/2 {
		t.Error("too few for a test")
	}
}

func playMoves(t *testing.T, seed uint64) int {
	random := rand.New(rand.NewPCG(seed, 17))
	ranks, servers, more := 2+random.IntN(3), 1+random.IntN(3), random.IntN(3)
	models := []string{"bsp", "asp", "ssp:3", "dsps:1,5", "pssp:1,0.5", "expression:lead < 4", "adaptive:1,1", "adaptive:3,2", "elastic:5"}
	model, placement := models[random.IntN(len(models))], []string{"largest-first", "eps", "proportional", "psld:0.5", "psld:0.5"}[random.IntN(5)]
	elements := 30_000 + random.IntN(30_000)
	if servers == 1 {
		more++
	}
	var logs *observer.ObservedLogs
	j, network := apartOn(t, ranks, jobtest.Dedicated(servers), movers(&logs), jobtest.With(func(s *settings.Settings) {
		s.Placement, s.PlacementPeriod, s.Connections = placement, 100*time.Millisecond, 1+random.IntN(2)
	}))
	j.Start()
	var script strings.Builder
	slow := random.IntN(servers)
	for rank := range ranks {
		fmt.Fprintf(&script, "at 0s %s<->%s rate %d\n", nodeName(rank), serverName(slow), 2<<20)
		fmt.Fprintf(&script, "at 2s %s<->%s rate %d\n", nodeName(rank), serverName(slow), 20<<20)
	}
	if err := network.Script(script.String()); err != nil {
		t.Fatal(err)
	}
	var changing sync.WaitGroup
	later := func(change func()) {
		at := time.Duration(random.IntN(2000)) * time.Millisecond
		changing.Go(func() {
			time.Sleep(at) // virtual
			change()
		})
	}
	for range more {
		later(j.StartServer)
	}
	for _, i := range random.Perm(servers)[:random.IntN(servers)] {
		later(func() { j.StopServer(i) })
	}
	what := fmt.Sprintf("%s under %s, %d ranks, %d servers and %d more", model, placement, ranks, servers, more)
	ended := make([]*jobtest.Shares, ranks)
	for rank, err := range j.Outcomes(func(rank int) (err error) {
		ended[rank], err = addShares(j, rank, model, elements, rand.New(rand.NewPCG(seed, uint64(rank))))
		return err
	}) {
		if err != nil {
			t.Errorf("%s: rank %d: %v", what, rank, err)
		}
	}
	changing.Wait()
	for rank, s := range ended {
		for other := range ranks {
			if t.Failed() {
				break
			}
			if err := s.Has(other, sharesAdded); err != nil {
				t.Errorf("%s: in the end of rank %d: %v", what, rank, err)
			}
		}
	}
	return given(logs)
}

// TestHeldValuesMoveToAServerThatJoins, which takes its share of them; no iteration takes more than one more, and 100 ms.
func TestHeldValuesMoveToAServerThatJoins(t *testing.T) {
	for _, model := range []string{"ssp:3", "adaptive:3,3"} {
		t.Run(model, func(t *testing.T) {
			suspended(t, "a server that joins", (*jobtest.Job).StartServer, takesItsShare, func(j *jobtest.Job, rank, iteration int) error {
				s := j.Held(rank, "weights", model, 50000)
				if stepped(model) {
					s.Group = s.Name
				}
				if iteration == 0 {
					return s.Use(units.Declare, 10)
				}
				return s.Step(1)
			})
		})
	}
}

// TestResidualsMoveWithTheirSums: results are the same bits as without the moves.
func TestResidualsMoveWithTheirSums(t *testing.T) {
	joins := func(j *jobtest.Job, _ *transporttest.Network) {
		j.StartServer()
		time.Sleep(60 * time.Millisecond) // virtual: an iteration or so
		j.StartServer()
	}
	leaves := func(j *jobtest.Job, _ *transporttest.Network) { j.StopServer(0) }
	toAndFro := func(j *jobtest.Job, network *transporttest.Network) {
		for rank := range j.Workers {
			for i, rates := range [][2]int{{1, 20}, {20, 1}} { // first the one server is slow, then the other
				for server, rate := range rates {
					if err := network.Script(fmt.Sprintf("at %ds %s<->%s rate %d", i, nodeName(rank), serverName(server), rate<<20)); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
	for i, setting := range []string{"topk:0.1", "int4:block=64,feedback=on", "dgc:0.1,momentum=0.9"} {
		results, moved := codedSums(t, setting, floats[i], nil)
		if moved {
			t.Fatal("partitions have moved by themselves")
		}
		for how, moves := range map[string]func(*jobtest.Job, *transporttest.Network){"to servers that join": joins, "to and fro": toAndFro, "from a server that leaves": leaves} {
			again, moved := codedSums(t, setting, floats[i], moves)
			if !moved && how != "from a server that leaves" { // whose exchanges do not tell of the heir
				t.Errorf("%s, %s: no partition has moved", setting, how)
			}
			for k := range results {
				if !slices.Equal(results[k], again[k]) {
					t.Errorf("%s, %s: results of iteration %d are %g apart", setting, how, k, norm(results[k], again[k]))
				}
			}
		}
	}
}

// codedSums are the averages of some iterations, while partitions move if they do; moved says whether any has.
func codedSums(t *testing.T, setting string, dtype units.DType, moves func(*jobtest.Job, *transporttest.Network)) (results [][]float64, moved bool) {
	const iterations, n = 30, 50_000
	synctest.Test(t, func(t *testing.T) {
		period := 300 * time.Millisecond
		if moves == nil {
			period = 0
		}
		j, network := apartOn(t, 3, jobtest.Dedicated(2), jobtest.With(func(s *settings.Settings) {
			s.Connections, s.Placement, s.PlacementPeriod = 2, "psld:0.1", period
		}))
		j.Start()
		seen := homes{at: map[uint32]int{}}
		j.Workers[0].Engine.Observe(&seen)
		for k := range iterations {
			if k == 3 && moves != nil {
				go moves(j, network)
			}
			time.Sleep(50 * time.Millisecond) // virtual
			results = append(results, averages(j, "g", jobtest.CodedBy(setting), dtype, func(rank int) []float64 { return jobtest.Normal(n, uint64(k), uint64(rank)) }))
		}
		moved = seen.moved
	})
	return results, moved
}

// homes notes where the partitions of a tensor are, and whether any has moved.
type homes struct {
	at    map[uint32]int
	moved bool
}

// Ended implements worker.Observer.
func (h *homes) Ended(_ worker.Observed, exchanges []worker.Exchange, _ error) {
	for _, x := range exchanges {
		was, known := h.at[x.Partition]
		h.moved = h.moved || known && was != x.Server
		h.at[x.Partition] = x.Server
	}
}

// stateDuring is what all ranks have in their states after some sums, while something happens to the servers and the ranks go on.
func stateDuring(t *testing.T, change func(j *jobtest.Job, network *transporttest.Network), before func(j *jobtest.Job, rank int)) [][]byte {
	all := make([][]byte, 3)
	synctest.Test(t, func(t *testing.T) {
		gradient := func(k, rank int) []float64 { return jobtest.Normal(50_000, uint64(k), uint64(rank)) }
		j, network := apartOn(t, len(all), jobtest.Dedicated(2))
		j.Start()
		for k := range 3 {
			averages(j, "g", jobtest.CodedBy("topk:0.1"), units.Float32, func(rank int) []float64 { return gradient(k, rank) })
		}
		change(j, network)
		averages(j, "g", jobtest.CodedBy("topk:0.1"), units.Float32, func(rank int) []float64 {
			before(j, rank)
			state, err := stateOf(j, rank)
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
			all[rank] = state
			return gradient(3, rank)
		})
	})
	return all
}

// sameStates compares the states of all ranks with those where nothing happens to the servers.
func sameStates(t *testing.T, got, want [][]byte, when string) {
	t.Helper()
	for rank := range want {
		if string(got[rank]) != string(want[rank]) {
			t.Errorf("%s: rank %d has another state than without", when, rank)
		}
	}
}

// TestAStateHasTheResidualsOfServersThatLeave, at any moment: those of keys that a rank keeps it brings to the heirs itself, before it asks them.
func TestAStateHasTheResidualsOfServersThatLeave(t *testing.T) {
	want := undisturbed(t)
	for _, after := range []time.Duration{0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 1000} {
		after *= time.Millisecond
		got := stateDuring(t, func(j *jobtest.Job, _ *transporttest.Network) { go j.StopServer(0) }, func(*jobtest.Job, int) { time.Sleep(after) }) // virtual
		sameStates(t, got, want, fmt.Sprintf("after %v", after))
	}
}

// TestAStateHasTheResidualsOfKeysThatMove, also where other ranks have pushed since, and carry them.
func TestAStateHasTheResidualsOfKeysThatMove(t *testing.T) {
	want := undisturbed(t)
	for late := range want {
		got := stateDuring(t, comes, func(_ *jobtest.Job, rank int) {
			if rank == late {
				time.Sleep(time.Second)
			}
		})
		sameStates(t, got, want, fmt.Sprintf("rank %d is late", late))
	}
}

// TestAStateHasTheResidualsOfKeysThatMoveFromAServerThatLeaves, also where other ranks carry them over slow links.
func TestAStateHasTheResidualsOfKeysThatMoveFromAServerThatLeaves(t *testing.T) {
	want := undisturbed(t)
	for late := range want {
		for server := range 2 {
			got := stateDuring(t, func(j *jobtest.Job, network *transporttest.Network) {
				comes(j, network)
				for rank := range want {
					if rank == late {
						continue
					}
					if err := network.Script(fmt.Sprintf("at 0s %s<->%s rate %d\n", nodeName(rank), serverName(2), 100<<10)); err != nil {
						t.Error(err)
					}
				}
			}, func(j *jobtest.Job, rank int) {
				if rank == late {
					time.Sleep(20 * time.Millisecond) // virtual: others have pushed
					go j.StopServer(server)
					time.Sleep(20 * time.Millisecond)
				}
			})
			sameStates(t, got, want, fmt.Sprintf("rank %d is late, server %d leaves", late, server))
		}
	}
}

// TestStatesHaveAllResidualsWhateverMoves plays jobs of which each rank takes its state before each iteration, late or not, while servers join, one leaves, and one after the
// other turns out to be slow. All states are the same bits as without.
func TestStatesHaveAllResidualsWhateverMoves(t *testing.T) {
	want := statesOnTheMove(t, nil)
	for seed := *stateMoveSeed; seed < *stateMoveSeed+uint64(*stateMoves); seed++ {
		got := statesOnTheMove(t, rand.New(rand.NewPCG(seed, 5)))
		for k := range want {
			sameStates(t, got[k][:], want[k][:], fmt.Sprintf("before iteration %d (again: go test -tags invariants ./jobtest -run TestStatesHaveAll -statemove %d -statemoves 1)", k, seed))
		}
	}
}

// statesOnTheMove are the states of all ranks by iteration; nil for nothing that moves.
func statesOnTheMove(t *testing.T, random *rand.Rand) [][3][]byte {
	all := make([][3][]byte, 12)
	synctest.Test(t, func(t *testing.T) {
		period := time.Duration(0)
		if random != nil {
			period = 100 * time.Millisecond
		}
		j, network := apartOn(t, len(all[0]), jobtest.Dedicated(2), jobtest.With(func(s *settings.Settings) {
			s.Connections, s.Placement, s.PlacementPeriod = 2, "psld:0.1", period
		}))
		j.Start()
		var late [12][3]time.Duration
		var changing sync.WaitGroup
		if random != nil {
			later := func(change func()) {
				at := time.Duration(random.IntN(900)) * time.Millisecond
				changing.Go(func() {
					time.Sleep(at) // virtual
					change()
				})
			}
			for range random.IntN(3) {
				later(j.StartServer)
			}
			if random.IntN(2) == 0 {
				later(func() { j.StopServer(0) })
			}
			for rank := range all[0] {
				for i, rates := range [][2]int{{1, 20}, {20, 1}} { // first the one server is slow, then the other
					for server, rate := range rates {
						if err := network.Script(fmt.Sprintf("at %dms %s<->%s rate %d", 400*i, nodeName(rank), serverName(server), rate<<20)); err != nil {
							t.Error(err)
						}
					}
				}
			}
			for k := range late {
				for rank := range late[k] {
					late[k][rank] = time.Duration(random.IntN(2)*random.IntN(120)) * time.Millisecond
				}
			}
		}
		for k := range all {
			averages(j, "g", jobtest.CodedBy("topk:0.1"), units.Float32, func(rank int) []float64 {
				time.Sleep(late[k][rank])
				state, err := stateOf(j, rank)
				if err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
				all[k][rank] = state
				return jobtest.Normal(50_000, uint64(k), uint64(rank))
			})
		}
		changing.Wait()
	})
	return all
}

// comes has a server join, and keys in use move to it.
func comes(j *jobtest.Job, _ *transporttest.Network) {
	j.StartServer()
	time.Sleep(time.Second) // virtual
}

func undisturbed(t *testing.T) [][]byte {
	return stateDuring(t, func(*jobtest.Job, *transporttest.Network) {}, func(*jobtest.Job, int) {})
}

// TestAMovedValueIsTheSameBits as without the move, to a server that joins or from one that leaves, also where what ranks have read of it is not exact: its codec leaves much out, its gate holds it back, or its type
// is narrower than what servers add.
func TestAMovedValueIsTheSameBits(t *testing.T) {
	for _, c := range []struct {
		codec string
		dtype units.DType
		sync  string
		gate  float64
	}{
		{"topk:0.1", units.Float32, "ssp:2", 0}, {"randomk:0.25", units.Float64, "bsp", 0}, {"none+s2", units.BFloat16, "bsp", 0}, {"", units.Float16, "ssp:2", 0},
		{"none", units.Float32, "ssp:2", 0.1}, {"topk:0.1", units.Float32, "bsp", 0.1},
	} {
		var ends [3][]float64
		for move := range ends { // none, to a server that joins, from one that leaves
			synctest.Test(t, func(t *testing.T) {
				const ranks, iterations, n = 3, 16, 80_000
				var logs *observer.ObservedLogs
				j := apart(t, ranks, 2, movers(&logs))
				j.Start()
				j.Each(func(rank int) error {
					v := &codedValue{j: j, rank: rank, name: "v", sync: c.sync, gate: options.Gate{Threshold: c.gate}, dtype: c.dtype, op: units.Sum, n: n}
					if c.codec != "" {
						v.codec = jobtest.CodedBy(c.codec)
					}
					if _, err := v.use(units.Declare, slices.Repeat([]float64{2048}, n)); err != nil {
						return err
					}
					for i := range iterations {
						if rank == 0 && i == iterations/2 {
							[]func(){func() {}, j.StartServer, func() { j.StopServer(0) }}[move]()
							time.Sleep(time.Second) // virtual
						}
						if _, err := v.use(units.Add|units.Read, slices.Repeat([]float64{1}, n)); err != nil {
							return err
						}
					}
					if err := j.Sums(rank, "end", 1); err != nil {
						return err
					}
					end, err := v.use(units.ReadNow|units.Exact, nil)
					if rank == 0 {
						ends[move] = end
					}
					return err
				})
				if n := given(logs); (n > 0) != (move == 1) {
					t.Errorf("%d partitions have moved", n)
				}
			})
		}
		for move := 1; move < len(ends); move++ {
			if !slices.Equal(ends[0], ends[move]) {
				t.Errorf("%q of %v under %s, gate %g, move %d: %g apart", c.codec, c.dtype, c.sync, c.gate, move, norm(ends[0], ends[move]))
			}
		}
	}
}

// TestConditionsGoWithTheirValues: a model that was changed while training runs holds where the values go on, from the iteration that all servers agreed on.
func TestConditionsGoWithTheirValues(t *testing.T) {
	for how, change := range map[string]func(t *testing.T, j *jobtest.Job, network *transporttest.Network){
		"to a server that joins":     func(_ *testing.T, j *jobtest.Job, _ *transporttest.Network) { j.StartServer() },
		"from a server that leaves":  func(_ *testing.T, j *jobtest.Job, _ *transporttest.Network) { j.StopServer(0) },
		"from a server that is lost": func(t *testing.T, _ *jobtest.Job, network *transporttest.Network) { lose(t, network, 2, 0) },
	} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j, network := apartOn(t, 2, jobtest.Dedicated(2))
				j.Start()
				var values [2][6]*jobtest.Held // of one partition each
				j.Each(func(rank int) (err error) {
					for i := range values[rank] {
						values[rank][i], err = j.Declare(rank, fmt.Sprint("w", i), "asp", 5000)
						if err != nil {
							return err
						}
					}
					return nil
				})
				if at, err := j.Workers[1].Engine.SetCondition(t.Context(), nil, wire.Condition{Names: []string{"w*"}, Pull: "ssp:9"}); err != nil || at != 0 {
					t.Fatalf("from iteration %d, %v", at, err)
				}
				for _, v := range values[0] {
					ahead(t, v, 3)
				}
				at, err := j.Workers[1].Engine.SetCondition(t.Context(), nil, wire.Condition{Names: []string{"w*"}, Pull: "bsp"})
				if err != nil || at != 3 {
					t.Fatalf("from iteration %d, %v", at, err)
				}
				for _, v := range values[0] {
					if err := v.Use(units.ReadNow, 0); err != nil { // by which a lost server's heir knows of the change
						t.Fatal(err)
					}
				}
				change(t, j, network)
				time.Sleep(20 * time.Second) // virtual, as below
				for i, v := range values[0] {
					ahead(t, v, 6) // nine in all, as ssp:9 lets it until rank 1 has pushed three
					for _, until := range []int{10, 1} {
						held := waits(t, j, v)
						for range until {
							time.Sleep(100 * time.Millisecond)
							select {
							case r := <-held:
								t.Fatalf("value %d: rank 0 does not wait for rank 1: %v", i, r.Err)
							default:
							}
							if err := values[1][i].Use(units.Add, 1); err != nil {
								t.Fatal(err)
							}
						}
						if _, err := jobtest.Await(held, 0, "w"); err != nil {
							t.Fatal(err)
						}
					}
				}
			})
		})
	}
}

// lose has a server be lost.
func lose(t *testing.T, network *transporttest.Network, ranks, server int) {
	t.Helper()
	if err := network.Script(cutOff(ranks, server, 0, "cut")); err != nil {
		t.Fatal(err)
	}
}
