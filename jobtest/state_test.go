package jobtest_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// states are those of all ranks.
func (j *job) states() [][]byte {
	j.t.Helper()
	all := make([][]byte, len(j.workers))
	j.each(func(rank int) error {
		size, err := j.workers[rank].Engine.State(nil)
		if err != nil {
			return err
		}
		all[rank] = make([]byte, size+1)
		if n, err := j.workers[rank].Engine.State(all[rank]); err != nil || n != size {
			return fmt.Errorf("%d bytes of state, %d announced: %w", n, size, err)
		}
		all[rank] = all[rank][:size]
		return nil
	})
	return all
}

// restore sets the states of as many ranks as there are.
func (j *job) restore(states [][]byte) {
	j.t.Helper()
	j.each(func(rank int) error {
		if rank >= len(states) {
			return nil
		}
		return j.workers[rank].Engine.SetState(states[rank])
	})
}

// stateful are settings under which an iteration depends on those before: by residuals at both ends, momentum, a
// warm-up, or random numbers.
var stateful = []string{
	"topk:0.05,warmup=5", "onebit:block=64", "dgc:0.05,momentum=0.9,warmup=5", "int8:block=64,feedback=on", "int8:block=64",
	"randomk:0.1,warmup=5", "topk:0.05,feedback=off,warmup=5", "qsgd:levels=7,block=64", "int4:block=64,feedback=on+s2",
}

// train does some iterations of an average and a reducescatter under each stateful setting, and gives all results.
func (j *job) train(from, to int) (got [][]byte) {
	const n, columns = 2*partition/4 + 9, 300
	ranks := len(j.workers)
	for i := from; i < to; i++ {
		xs := make([][]float64, ranks)
		for rank := range xs {
			xs[rank] = normal(n, uint64(i), uint64(rank))
		}
		for _, setting := range stateful {
			got = append(got, elements(units.Float32, j.averages(setting, setting, units.Float32, func(rank int) []float64 { return xs[rank] })))
			pieces := make([][]byte, ranks)
			j.each(func(rank int) error {
				op := gradient(setting+" scattered", setting, units.Float16, xs[rank][:4*ranks*columns])
				op.Kind, op.Shape, op.Output = units.Reducescatter, []int64{4 * int64(ranks), columns}, make([]byte, 2*4*columns)
				pieces[rank] = op.Output
				_, err := j.do(rank, op)
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

// What was given is what was sent, and what the states have: nothing is lost between them, nor counted twice.
func TestWhatWasSentAndWhatTheStatesHaveIsWhatWasGiven(t *testing.T) {
	const n, iterations, ranks = 2*partition/4 + 9, 4, 3
	for _, options := range [][]jobOption{{smallPartitions}, {smallPartitions, both(1)}} {
		j := startJob(t, ranks, options...)
		for _, setting := range []string{"topk:0.1", "topk:0.05,warmup=3+zstd", "randomk:0.1", "threshold:1.5", "onebit:block=64", "int8:block=64,feedback=on", "int4:block=64,feedback=on"} {
			given, found := make([]float64, n), make([]float64, n)
			add := func(to, x []float64, share float64) {
				for i, f := range x {
					to[i] += share * f
				}
			}
			for k := range iterations {
				x := func(rank int) []float64 { return normal(n, uint64(k), uint64(rank)) }
				add(found, j.averages(setting, setting, units.Float32, x), 1)
				add(given, mean(ranks, x), 1)
			}
			sent := norm(given, found)
			for _, state := range j.states() {
				own, servers := residuals(state)
				add(found, numbers(units.Float32, own[setting]), 1./ranks)
				add(found, numbers(units.Float32, servers[setting]), 1)
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
		options []jobOption
	}{
		{"alone", 1, nil},
		{"embedded", 2, nil},
		{"dedicated, three connections", 2, []jobOption{dedicated(1), with(func(s *settings.Settings) { s.Connections = 3 })}},
		{"both, in memory", 2, []jobOption{both(1), inMemory(t)}},
		{"four ranks", 4, []jobOption{dedicated(2)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			options := slices.Concat(c.options, []jobOption{smallPartitions, with(repeatable)})
			whole := startJob(t, c.ranks, options...)
			whole.train(0, stop)
			states := whole.states()
			want := whole.train(stop, end)
			compare := func(what string, j *job) {
				t.Helper()
				for i, got := range j.train(stop, end) {
					if string(got) != string(want[i]) {
						t.Errorf("%s: result %d differs, which is of %s", what, i, stateful[i/(c.ranks+1)%len(stateful)])
					}
				}
			}
			for rank, s := range whole.states() {
				if len(s) != len(states[rank]) || string(s) == string(states[rank]) {
					t.Errorf("rank %d: %d bytes of state, then %d", rank, len(states[rank]), len(s))
				}
			}
			whole.restore(states) // in a job that has used the tensors
			compare("set back", whole)
			whole.shutdown()

			again := startJob(t, c.ranks, options...)
			again.restore(states)
			for rank, s := range again.states() {
				if string(s) != string(states[rank]) {
					t.Errorf("rank %d: what is not used yet is not what was set", rank)
				}
			}
			compare("restarted", again)
		})
	}
}

// All that was given and not sent is in the states: carried to other servers and partitions it is sent there, once.
func TestResidualsAreCarriedToOtherPartitions(t *testing.T) {
	const n, iterations = 3*partition/4 + 5, 3
	for _, setting := range []string{"topk:0.1", "randomk:0.5+s2"} {
		given, sent := make([]float64, n), make([]float64, n)
		before := startJob(t, 2, smallPartitions)
		add := func(to, x []float64) {
			for i := range to {
				to[i] += x[i]
			}
		}
		for k := range iterations {
			x := func(rank int) []float64 { return normal(n, uint64(k), uint64(rank)) }
			add(given, mean(2, x))
			add(sent, before.averages("w", setting, units.Float32, x))
		}
		after := startJob(t, 2, dedicated(3), with(func(s *settings.Settings) { s.PartitionBytes = partition + 4096 }))
		after.restore(before.states())
		for range 45 {
			add(sent, after.averages("w", setting, units.Float32, func(int) []float64 { return make([]float64, n) }))
		}
		if off := norm(given, sent); off > 1e-3 {
			t.Errorf("%s: %g of what was given is not what was sent", setting, off)
		}
	}
}

// A rank without a state begins at zero, and what only the state of one had that is not there any more is dropped.
func TestAStateInAJobOfAnotherSize(t *testing.T) {
	j := startJob(t, 2, smallPartitions)
	x := func(rank int) []float64 { return normal(3*partition/4, uint64(rank)) }
	for range 3 {
		j.averages("w", "onebit", units.Float32, x)
	}
	states := j.states()
	for _, ranks := range []int{1, 3} {
		other := startJob(t, ranks, smallPartitions, dedicated(1))
		other.restore(states)
		plain := startJob(t, ranks, smallPartitions, dedicated(1))
		got, fresh := other.averages("w", "onebit", units.Float32, x), plain.averages("w", "onebit", units.Float32, x)
		if slices.Equal(got, fresh) {
			t.Errorf("%d ranks: the state changes nothing", ranks)
		}
		other.states()
	}
}

// Held values keep no residual on servers. A rank's own, and how far the warm-up has come, are carried.
func TestTheStateOfAHeldValue(t *testing.T) {
	const n, setting = 2*partition/4 + 9, "topk:0.01,warmup=4"
	use := func(j *job, use units.Use) {
		j.each(func(rank int) error {
			v := &codedValue{j: j, rank: rank, name: "w", codec: setting, sync: "ssp:0", dtype: units.Float32, op: units.Sum, n: n}
			_, err := v.use(use, normal(n, uint64(rank)))
			return err
		})
	}
	j := startJob(t, 2, smallPartitions, dedicated(1))
	use(j, units.Declare)
	for range 6 {
		use(j, units.Add|units.Read)
	}
	states := j.states()
	j.restore(states)
	if !slices.EqualFunc(j.states(), states, slices.Equal[[]byte]) {
		t.Error("the state that was set is not the state")
	}
	use(j, units.Add|units.Read)

	again := startJob(t, 2, smallPartitions, dedicated(1))
	again.restore(states)
	use(again, units.Declare)
	if !slices.EqualFunc(again.states(), states, slices.Equal[[]byte]) {
		t.Error("the state after the declaration is not what was set")
	}
	use(again, units.Add|units.Read)
}

func TestAStateIsTakenBetweenOperationsAndSetWhole(t *testing.T) {
	j := startJob(t, 2)
	ones := func(int) []float64 { return normal(2000, 1) }
	j.averages("w", "topk:0.1", units.Float32, ones)
	engine := j.workers[0].Engine
	states := j.states()
	for _, wrong := range [][]byte{nil, []byte("PLS"), []byte("nonsense"), states[0][:len(states[0])-1], append(slices.Clone(states[0]), 0)} {
		if err := engine.SetState(wrong); !errors.Is(err, worker.ErrInvalid) {
			t.Errorf("%d bytes: %v", len(wrong), err)
		}
	}
	if now := j.states(); !slices.EqualFunc(now, states, slices.Equal[[]byte]) {
		t.Error("what is no state has changed it")
	}
	waiting, err := j.submit(0, gradient("w", "topk:0.1", units.Float32, ones(0)))
	if err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"taken": second(engine.State(nil)), "set": engine.SetState(states[0])} {
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), `"w" is in flight on rank 0`) {
			t.Errorf("%s in flight: %v", what, err)
		}
	}
	if _, err := j.do(1, gradient("w", "topk:0.1", units.Float32, ones(1))); err != nil {
		t.Error(err)
	}
	if _, err := await(waiting[0], 0, "w"); err != nil {
		t.Error(err)
	}
	for rank := range j.workers {
		if err := j.workers[rank].Engine.SetState(states[rank][:4]); err != nil {
			t.Error(err)
		}
	}
	if size, err := engine.State(nil); size != 4 || err != nil {
		t.Errorf("%d bytes of state after all was dropped: %v", size, err)
	}
	j.averages("w", "topk:0.1", units.Float32, ones)
}

// A rank that has begun without a state while others have set theirs hears so, and so do those.
func TestAStateThatOnlySomeRanksSetIsAnErrorOnAll(t *testing.T) {
	for _, sync := range []string{"", "drop-stragglers:2"} {
		j := startJob(t, 3, dedicated(1))
		op := func(rank int) worker.Op {
			o := gradient("w", "topk:0.1", units.Float32, normal(2000, uint64(rank)))
			o.Sync.Model = sync
			return o
		}
		all := func() {
			j.each(func(rank int) error {
				_, err := j.do(rank, op(rank))
				return err
			})
		}
		all()
		states := j.states()
		waiting, err := j.submit(0, op(0))
		if err != nil {
			t.Fatal(err)
		}
		j.averages("behind it", "topk:0.1", units.Float32, func(int) []float64 { return normal(2000, 1) }) // the server has got it
		for rank := 1; rank < 3; rank++ {
			if err := j.workers[rank].Engine.SetState(states[rank]); err != nil {
				t.Fatal(err)
			}
		}
		check := func(rank int, err error) {
			if err == nil || !strings.Contains(err.Error(), "every rank loads its own") {
				t.Errorf("%q, rank %d: %v", sync, rank, err)
			}
		}
		_, err = await(waiting[0], 0, "w")
		check(0, err)
		for rank := 1; rank < 3; rank++ {
			_, err := j.do(rank, op(rank))
			check(rank, err)
		}
		all()
	}
}

func second(_ int, err error) error { return err }
