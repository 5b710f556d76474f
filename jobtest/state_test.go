package jobtest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/worker"
)

// states are those of all ranks.
func states(j *jobtest.Job) [][]byte {
	j.T.Helper()
	all := make([][]byte, len(j.Workers))
	j.Each(func(rank int) (err error) {
		all[rank], err = stateOf(j, rank)
		return err
	})
	return all
}

func stateOf(j *jobtest.Job, rank int) ([]byte, error) {
	size, err := j.Workers[rank].Engine.State(nil)
	if err != nil {
		return nil, err
	}
	state := make([]byte, size+1)
	if n, err := j.Workers[rank].Engine.State(state); err != nil || n != size {
		return nil, fmt.Errorf("%d bytes of state, %d announced: %w", n, size, err)
	}
	return state[:size], nil
}

// restore sets the states of as many ranks as there are.
func restore(j *jobtest.Job, states [][]byte) {
	j.T.Helper()
	j.Each(func(rank int) error {
		if rank >= len(states) {
			return nil
		}
		return j.Workers[rank].Engine.SetState(states[rank])
	})
}

// stateful are settings under which an iteration depends on those before: by residuals at both ends, momentum, a
// warm-up, or random numbers.
var stateful = []string{
	"topk:0.05,warmup=5", "onebit:block=64", "dgc:0.05,momentum=0.9,warmup=5", "int8:block=64,feedback=on", "int8:block=64",
	"randomk:0.1,warmup=5", "topk:0.05,feedback=off,warmup=5", "qsgd:levels=7,block=64", "int4:block=64,feedback=on+s2",
}

// train does some iterations of an average and a reducescatter under each stateful setting, and returns all results.
func train(j *jobtest.Job, from, to int) (got [][]byte) {
	const n, columns = 2*jobtest.Partition/4 + 9, 300
	ranks := len(j.Workers)
	for i := from; i < to; i++ {
		xs := make([][]float64, ranks)
		for rank := range xs {
			xs[rank] = jobtest.Normal(n, uint64(i), uint64(rank))
		}
		for _, setting := range stateful {
			got = append(got, jobtest.Elements(units.Float32, averages(j, setting, setting, units.Float32, func(rank int) []float64 { return xs[rank] })))
			pieces := make([][]byte, ranks)
			j.Each(func(rank int) error {
				op := gradient(setting+" scattered", setting, units.Float16, xs[rank][:4*ranks*columns])
				op.Kind, op.Shape, op.Output = units.Reducescatter, []int64{4 * int64(ranks), columns}, make([]byte, 2*4*columns)
				pieces[rank] = op.Output
				_, err := j.Do(rank, op)
				return err
			})
			got = append(got, pieces...)
		}
	}
	return got
}

// residuals are what a rank's state has of each tensor: its own residual, and the elements that servers keep of it.
func residuals(state []byte) (own, servers map[string][]byte) {
	own, servers = map[string][]byte{}, map[string][]byte{}
	at := 4
	number := func(bytes int) int {
		var b [8]byte
		at += copy(b[:bytes], state[at:])
		return int(binary.LittleEndian.Uint64(b[:]))
	}
	cut := func(n int) []byte {
		at += n
		return state[at-n : at]
	}
	for at < len(state) {
		number(4)
		name := string(cut(number(4)))
		cut(number(4))
		number(8)
		own[name] = cut(number(8))
		for range number(4) {
			first, piece := 4*number(8), cut(number(8))
			servers[name] = append(servers[name], make([]byte, max(first+len(piece)-len(servers[name]), 0))...)
			copy(servers[name][first:], piece)
		}
	}
	return own, servers
}

// The inputs are the sum of the sent values and of the states: nothing is lost, nothing counted twice.
func TestWhatWasSentAndWhatTheStatesHaveIsWhatWasGiven(t *testing.T) {
	const n, iterations, ranks = 2*jobtest.Partition/4 + 9, 4, 3
	for _, options := range [][]jobtest.Option{{jobtest.SmallPartitions}, {jobtest.SmallPartitions, jobtest.Both(1)}} {
		j := jobtest.Start(t, ranks, options...)
		for _, setting := range []string{"topk:0.1", "topk:0.05,warmup=3+zstd", "randomk:0.1", "threshold:1.5", "onebit:block=64", "int8:block=64,feedback=on", "int4:block=64,feedback=on"} {
			given, found := make([]float64, n), make([]float64, n)
			add := func(to, x []float64, share float64) {
				for i, f := range x {
					to[i] += share * f
				}
			}
			for k := range iterations {
				x := func(rank int) []float64 { return jobtest.Normal(n, uint64(k), uint64(rank)) }
				add(found, averages(j, setting, setting, units.Float32, x), 1)
				add(given, mean(ranks, x), 1)
			}
			sent := norm(given, found)
			for _, state := range states(j) {
				own, servers := residuals(state)
				add(found, jobtest.Numbers(units.Float32, own[setting]), 1./ranks)
				add(found, jobtest.Numbers(units.Float32, servers[setting]), 1)
			}
			if off := norm(given, found); off > 1e-5*norm(given, make([]float64, n)) || sent < 1e3*off {
				t.Errorf("%s: what was sent is off by %g, with what the states have by %g", setting, sent, off)
			}
		}
	}
}

func repeatable(s *settings.Settings) { s.Seed, s.SumInRankOrder = 7, true }

func TestARestoredJobGoesOnAsIfItHadNotEnded(t *testing.T) {
	const stop, end = 3, 5
	for _, c := range []struct {
		name    string
		ranks   int
		options []jobtest.Option
	}{
		{"alone", 1, nil},
		{"embedded", 2, nil},
		{"dedicated, three connections", 2, []jobtest.Option{jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) { s.Connections = 3 })}},
		{"both, in memory", 2, []jobtest.Option{jobtest.Both(1), jobtest.InMemory(t)}},
		{"four ranks", 4, []jobtest.Option{jobtest.Dedicated(2)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			options := slices.Concat(c.options, []jobtest.Option{jobtest.SmallPartitions, jobtest.With(repeatable)})
			whole := jobtest.Start(t, c.ranks, options...)
			train(whole, 0, stop)
			taken := states(whole)
			want := train(whole, stop, end)
			compare := func(what string, j *jobtest.Job) {
				t.Helper()
				for i, got := range train(j, stop, end) {
					if string(got) != string(want[i]) {
						t.Errorf("%s: result %d differs, which is of %s", what, i, stateful[i/(c.ranks+1)%len(stateful)])
					}
				}
			}
			for rank, s := range states(whole) {
				if len(s) != len(taken[rank]) || string(s) == string(taken[rank]) {
					t.Errorf("rank %d: %d bytes of state, then %d", rank, len(taken[rank]), len(s))
				}
			}
			restore(whole, taken) // in a job that has used the tensors
			compare("set back", whole)
			whole.Shutdown()

			again := jobtest.Start(t, c.ranks, options...)
			restore(again, taken)
			for rank, s := range states(again) {
				if string(s) != string(taken[rank]) {
					t.Errorf("rank %d: what is not used yet is not what was set", rank)
				}
			}
			compare("restarted", again)
		})
	}
}

// Input that was not sent is in the states. Restored with other servers and partitions, it is sent once.
func TestResidualsAreCarriedToOtherPartitions(t *testing.T) {
	const n, iterations = 3*jobtest.Partition/4 + 5, 3
	for _, setting := range []string{"topk:0.1", "randomk:0.5+s2"} {
		given, sent := make([]float64, n), make([]float64, n)
		before := jobtest.Start(t, 2, jobtest.SmallPartitions)
		add := func(to, x []float64) {
			for i := range to {
				to[i] += x[i]
			}
		}
		for k := range iterations {
			x := func(rank int) []float64 { return jobtest.Normal(n, uint64(k), uint64(rank)) }
			add(given, mean(2, x))
			add(sent, averages(before, "w", setting, units.Float32, x))
		}
		after := jobtest.Start(t, 2, jobtest.Dedicated(3), jobtest.With(func(s *settings.Settings) { s.PartitionBytes = jobtest.Partition + 4096 }))
		restore(after, states(before))
		for range 45 {
			add(sent, averages(after, "w", setting, units.Float32, func(int) []float64 { return make([]float64, n) }))
		}
		if off := norm(given, sent); off > 1e-3 {
			t.Errorf("%s: %g of what was given is not what was sent", setting, off)
		}
	}
}

// A rank without a state begins at zero. The part of a rank that no longer exists is dropped.
func TestAStateInAJobOfAnotherSize(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.SmallPartitions)
	x := func(rank int) []float64 { return jobtest.Normal(3*jobtest.Partition/4, uint64(rank)) }
	for range 3 {
		averages(j, "w", "onebit", units.Float32, x)
	}
	taken := states(j)
	for _, ranks := range []int{1, 3} {
		other := jobtest.Start(t, ranks, jobtest.SmallPartitions, jobtest.Dedicated(1))
		restore(other, taken)
		plain := jobtest.Start(t, ranks, jobtest.SmallPartitions, jobtest.Dedicated(1))
		got, fresh := averages(other, "w", "onebit", units.Float32, x), averages(plain, "w", "onebit", units.Float32, x)
		if slices.Equal(got, fresh) {
			t.Errorf("%d ranks: the state changes nothing", ranks)
		}
		states(other)
	}
}

// Held values keep no residual on servers. A rank's own, and how far the warm-up has come, are carried.
func TestTheStateOfAHeldValue(t *testing.T) {
	const n, setting = 2*jobtest.Partition/4 + 9, "topk:0.01,warmup=4"
	use := func(j *jobtest.Job, use units.Use) {
		j.Each(func(rank int) error {
			v := &codedValue{j: j, rank: rank, name: "w", codec: setting, sync: "ssp:0", dtype: units.Float32, op: units.Sum, n: n}
			_, err := v.use(use, jobtest.Normal(n, uint64(rank)))
			return err
		})
	}
	j := jobtest.Start(t, 2, jobtest.SmallPartitions, jobtest.Dedicated(1))
	use(j, units.Declare)
	for range 6 {
		use(j, units.Add|units.Read)
	}
	taken := states(j)
	restore(j, taken)
	if !slices.EqualFunc(states(j), taken, slices.Equal[[]byte]) {
		t.Error("the state that was set is not the state")
	}
	use(j, units.Add|units.Read)

	again := jobtest.Start(t, 2, jobtest.SmallPartitions, jobtest.Dedicated(1))
	restore(again, taken)
	use(again, units.Declare)
	if !slices.EqualFunc(states(again), taken, slices.Equal[[]byte]) {
		t.Error("the state after the declaration is not what was set")
	}
	use(again, units.Add|units.Read)
}

func TestAStateIsTakenBetweenOperationsAndSetWhole(t *testing.T) {
	j := jobtest.Start(t, 2)
	ones := func(int) []float64 { return jobtest.Normal(2000, 1) }
	averages(j, "w", "topk:0.1", units.Float32, ones)
	engine := j.Workers[0].Engine
	taken := states(j)
	for _, wrong := range [][]byte{nil, []byte("PLS"), []byte("nonsense"), taken[0][:len(taken[0])-1], append(slices.Clone(taken[0]), 0)} {
		if err := engine.SetState(wrong); !errors.Is(err, worker.ErrInvalid) {
			t.Errorf("%d bytes: %v", len(wrong), err)
		}
	}
	if now := states(j); !slices.EqualFunc(now, taken, slices.Equal[[]byte]) {
		t.Error("what is no state has changed it")
	}
	waiting, err := j.Submit(0, gradient("w", "topk:0.1", units.Float32, ones(0)))
	if err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"taken": second(engine.State(nil)), "set": engine.SetState(taken[0])} {
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), `"w" is in flight on rank 0`) {
			t.Errorf("%s in flight: %v", what, err)
		}
	}
	if _, err := j.Do(1, gradient("w", "topk:0.1", units.Float32, ones(1))); err != nil {
		t.Error(err)
	}
	if _, err := jobtest.Await(waiting[0], 0, "w"); err != nil {
		t.Error(err)
	}
	for rank := range j.Workers {
		if err := j.Workers[rank].Engine.SetState(taken[rank][:4]); err != nil {
			t.Error(err)
		}
	}
	if size, err := engine.State(nil); size != 4 || err != nil {
		t.Errorf("%d bytes of state after all was dropped: %v", size, err)
	}
	averages(j, "w", "topk:0.1", units.Float32, ones)
}

// If a rank begins without a state and others have set theirs, all of them get an error.
func TestAStateThatOnlySomeRanksSetIsAnErrorOnAll(t *testing.T) {
	for _, sync := range []string{"", "drop-stragglers:2"} {
		jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
			onlySomeRanksSetAState(t, network, sync)
		})
	}
}

func onlySomeRanksSetAState(t *testing.T, network jobtest.Option, sync string) {
	j := jobtest.Start(t, 3, network, jobtest.Dedicated(1))
	op := func(rank int) worker.Op {
		o := gradient("w", "topk:0.1", units.Float32, jobtest.Normal(2000, uint64(rank)))
		o.Sync.Model = sync
		return o
	}
	all := func() {
		j.Each(func(rank int) error {
			_, err := j.Do(rank, op(rank))
			return err
		})
	}
	all()
	taken := states(j)
	waiting, err := j.Submit(0, op(0))
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait() // the server has got it
	for rank := 1; rank < 3; rank++ {
		if err := j.Workers[rank].Engine.SetState(taken[rank]); err != nil {
			t.Fatal(err)
		}
	}
	check := func(rank int, err error) {
		if err == nil || !strings.Contains(err.Error(), "every rank loads its own") {
			t.Errorf("%q, rank %d: %v", sync, rank, err)
		}
	}
	_, err = jobtest.Await(waiting[0], 0, "w")
	check(0, err)
	for rank := 1; rank < 3; rank++ {
		_, err := j.Do(rank, op(rank))
		check(rank, err)
	}
	all()
}

func second(_ int, err error) error { return err }
