package jobtest_test

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// float32s is an operation on so many float32 of value one.
func float32s(kind units.Kind, name string, shape ...int64) worker.Op {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	var in []byte
	for range n {
		in = appendElement(in, units.Float32, 1)
	}
	op := worker.Op{Kind: kind, DType: units.Float32, ReduceOp: units.Sum, Shape: shape, Input: in, Name: name, Prescale: 1, Postscale: 1}
	if kind == units.Allreduce || kind == units.Broadcast {
		op.Output = in
	}
	return op
}

// mismatches are operations that rank 2 of 3 brings where the others bring an allreduce of float32
// [40000], and what the messages call them.
var mismatches = []struct {
	name  string
	bad   func(op *worker.Op)
	brand string
}{
	{"shape", func(op *worker.Op) { *op = float32s(units.Allreduce, op.Name, 200, 200) }, "allreduce Sum float32 [200, 200]"},
	{"length", func(op *worker.Op) { *op = float32s(units.Allreduce, op.Name, 3) }, "allreduce Sum float32 [3]"},
	{"type", func(op *worker.Op) { op.DType = units.Int32 }, "allreduce Sum int32 [40000]"},
	{"operator", func(op *worker.Op) { op.ReduceOp = units.Max }, "allreduce Max float32 [40000]"},
	{"kind", func(op *worker.Op) { op.Kind = units.Broadcast }, "broadcast float32 [40000] from rank 0"},
	{"another kind", func(op *worker.Op) { *op = float32s(units.Allgather, op.Name, 40000) }, "allgather float32 [*]"},
	{"prescale", func(op *worker.Op) { op.Prescale = 0.5 }, "allreduce Sum float32 [40000] prescale 0.5 postscale 1"},
	{"postscale", func(op *worker.Op) { op.Postscale = 2 }, "allreduce Sum float32 [40000] prescale 1 postscale 2"},
}

// TestRanksThatDisagreeAllGetAnError also goes on after each error, under the same name, with other
// operations in flight all the time.
func TestRanksThatDisagreeAllGetAnError(t *testing.T) {
	for _, place := range []jobOption{func(*job) {}, dedicated(2)} {
		j := startJob(t, 3, smallPartitions, place)
		for _, m := range mismatches {
			for range 3 {
				good := float32s(units.Allreduce, "x", 40000)
				bad := float32s(units.Allreduce, "x", 40000)
				m.bad(&bad)
				j.disagree(m.name, good, bad, "allreduce Sum float32 [40000]", m.brand)
			}
			j.works("x", 300000)
		}
	}
}

func TestBroadcastsFromDifferentRootsAreAnErrorOnEveryRank(t *testing.T) {
	j := startJob(t, 3, smallPartitions)
	for range 5 {
		good, bad := float32s(units.Broadcast, "x", 70000), float32s(units.Broadcast, "x", 70000)
		bad.Root = 2
		j.disagree("root", good, bad, "broadcast float32 [70000] from rank 0", "broadcast float32 [70000] from rank 2")
		j.works("x", 200)
	}
}

// disagree has rank 2 bring a bad operation and the others a good one. Every rank has to get an error
// that names the tensor, ranks and what both sides brought; all else has to go on.
func (j *job) disagree(what string, good, bad worker.Op, goodBrand, badBrand string) {
	j.t.Helper()
	text := regexp.MustCompile(`ranks disagree about "x": ranks? [012, ]+ brought (.*), rank [012] brought (.*)$`)
	errs := j.outcomes(func(rank int) error {
		op := good
		if rank == 2 {
			op = bad
		}
		op.Input = append([]byte(nil), op.Input...)
		op.Output = make([]byte, len(op.Output))
		others, err := j.submit(rank, sum("beside", 100000), sum("", 70000), sum("", 5))
		if err != nil {
			return fmt.Errorf("beside: %w", err)
		}
		_, failure := j.do(rank, op)
		for _, o := range others {
			if _, err := await(o, rank, "beside"); err != nil {
				return fmt.Errorf("beside: %w", err)
			}
		}
		return failure
	})
	for rank, err := range errs {
		if !errors.Is(err, worker.ErrMismatch) {
			j.t.Fatalf("%s: rank %d: %v, want a mismatch", what, rank, err)
		}
		found := text.FindStringSubmatch(err.Error())
		if len(found) != 3 || !(found[1] == goodBrand && found[2] == badBrand || found[1] == badBrand && found[2] == goodBrand) {
			j.t.Errorf("%s: rank %d: %q, want what both sides brought: %q and %q", what, rank, err, goodBrand, badBrand)
		}
	}
}

// TestUnnamedOperationsThatDisagree match by their order: the job goes on with the next ones.
func TestUnnamedOperationsThatDisagree(t *testing.T) {
	j := startJob(t, 2, smallPartitions)
	for range 5 {
		errs := j.outcomes(func(rank int) error {
			_, err := j.do(rank, sum("", 1000+rank))
			return err
		})
		for rank, err := range errs {
			if !errors.Is(err, worker.ErrMismatch) || !strings.Contains(err.Error(), `"allreduce.noname"`) {
				t.Fatalf("rank %d: %v, want a mismatch of allreduce.noname", rank, err)
			}
		}
		j.works("", 150000)
	}
}

// TestFailuresDoNotMixUpWhatFollowsThem has several operations of one name in flight behind the one
// that fails: those fail too, or are done right, alike on all ranks.
func TestFailuresDoNotMixUpWhatFollowsThem(t *testing.T) {
	j := startJob(t, 3, smallPartitions)
	for round := range 10 {
		j.outcomes(func(rank int) error {
			size := 1000
			if rank == round%3 {
				size++
			}
			first, err := j.submit(rank, sum("", size))
			if err != nil {
				return err
			}
			second, err := j.submit(rank, sum("", 120000))
			if err != nil {
				return err
			}
			for _, r := range append(first, second...) {
				if _, err := await(r, rank, ""); err != nil && strings.Contains(err.Error(), "hangs") {
					t.Error(err)
				}
			}
			return nil
		})
		j.works("", 150000)
	}
}

func TestDuplicateNameInFlightIsAnErrorOnThatRankAlone(t *testing.T) {
	j := startJob(t, 2)
	first, err := j.submit(0, sum("x", 10))
	if err != nil {
		t.Fatal(err)
	}
	for _, ops := range [][]worker.Op{{sum("x", 10)}, {sum("y", 1), sum("y", 1)}, {sum("y", 1), sum("x", 1)}} {
		_, err = j.submit(0, ops...)
		if !errors.Is(err, worker.ErrDuplicate) || !strings.Contains(err.Error(), "on rank 0; synchronise it first") {
			t.Fatalf("a second one of the name: %v", err)
		}
	}
	if err := j.sums(1, "x", 10); err != nil {
		t.Fatal(err)
	}
	if _, err := await(first[0], 0, "x"); err != nil {
		t.Fatal(err)
	}
	j.works("x", 10)
	j.works("y", 1)
}

func TestOperationsThatCannotBeAreRefusedWhenSubmitted(t *testing.T) {
	j := startJob(t, 2)
	half := wire.ProcessSet{ID: 1, Ranks: []int{1}}
	edit := func(op worker.Op, change func(*worker.Op)) worker.Op { change(&op); return op }
	for _, c := range []struct {
		op   worker.Op
		text string
	}{
		{edit(float32s(units.Alltoall, "x", 5), func(*worker.Op) {}), `"x": alltoall without splits needs a first dimension divisible by 2 ranks, not 5`},
		{edit(float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{1} }), `"x": 1 splits for 2 ranks`},
		{edit(float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{-1, 2} }), `"x": splits [-1 2], allowed are 0 to the first dimension, 5`},
		{edit(float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{3, 3} }), `"x": splits [3 3] sum to 6, more than the first dimension, 5`},
		{edit(float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{1 << 62, 1 << 62} }), `allowed are 0 to the first dimension, 5`},
		{edit(float32s(units.Allgather, "x", 5), func(o *worker.Op) { o.Shape, o.Input = nil, o.Input[:4] }), `"x": allgather needs a tensor of at least one dimension`},
		{edit(float32s(units.Reducescatter, "x", 1), func(o *worker.Op) { o.Shape = nil }), `"x": reducescatter needs a tensor of at least one dimension`},
		{edit(sum("x", 4), func(o *worker.Op) { o.ReduceOp = units.Adasum }), `"x": Adasum is defined for allreduce of floating-point tensors, not for allreduce of uint8`},
		{edit(float32s(units.Reducescatter, "x", 2), func(o *worker.Op) { o.ReduceOp, o.Output = units.Adasum, make([]byte, 4) }), `"x": Adasum is defined for allreduce of floating-point tensors, not for reducescatter of float32`},
		{edit(sum("x", 4), func(o *worker.Op) { o.DType = units.Bool }), `"x": allreduce of bool tensors is not defined; convert to uint8 first`},
		{edit(sum("x", 4), func(o *worker.Op) { o.Kind, o.DType, o.Output = units.Reducescatter, units.Bool, o.Output[:2] }), `"x": reducescatter of bool tensors is not defined`},
		{edit(sum("x", 4), func(o *worker.Op) { o.Set = half }), `"x": rank 0 is not in process set 1 [1]`},
		{edit(float32s(units.Broadcast, "x", 4), func(o *worker.Op) { o.Root = 2 }), `"x": root rank 2 is not in process set 0 [0 1]`},
		{edit(sum("x", 4), func(o *worker.Op) { o.Shape = []int64{1 << 41} }), fmt.Sprintf(`"x": shape [2199023255552] of uint8 is larger than the limit of %d bytes`, int64(limits.MaxTensor))},
		{edit(sum("x", 4), func(o *worker.Op) { o.Shape = []int64{1 << 32, 1 << 32} }), `is larger than the limit of`},
		{edit(sum("x", 4), func(o *worker.Op) { o.Shape = []int64{-4} }), `"x": negative dimension in shape [-4]`},
		{edit(sum("x", 4), func(o *worker.Op) { o.Shape = []int64{5} }), `"x": input of 4 bytes for shape [5] of uint8, want 5`},
		{edit(sum("x", 4), func(o *worker.Op) { o.Output = o.Output[:3] }), `"x": output of 3 bytes, want 4`},
		{edit(sum("x", 1), func(o *worker.Op) { o.Shape = make([]int64, limits.MaxDims+1) }), `"x": 65 dimensions, limit 64`},
		{sum(strings.Repeat("x", limits.MaxName+1), 1), `tensor name of 4097 bytes, limit 4096`},
		{edit(sum("x", 4), func(o *worker.Op) { o.PullGate.Threshold = 0.5 }), `"x": a gate for pulls is for held values, not for allreduce`},
		{edit(sum("x", 4), func(o *worker.Op) { o.DType = 77 }), `unknown kind allreduce, type dtype(77)`},
	} {
		_, err := j.submit(0, sum("beside", 1), c.op)
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("got %q, want it to say %q", err, c.text)
		}
	}
	j.works("x", 4) // nothing was left behind, of the group's good ones neither
	j.works("beside", 4)
}

func TestServerMemoryLimitIsAnErrorOnEveryRank(t *testing.T) {
	for _, kind := range []units.Kind{units.Allreduce, units.Broadcast, units.Allgather} {
		t.Run(kind.String(), func(t *testing.T) {
			// One partition is more than the server has: it does not hang on how fast readers are.
			j := startJob(t, 3, dedicated(1), with(func(s *settings.Settings) { s.ServerMemory = 1 << 20 }))
			for range 3 {
				errs := j.outcomes(func(rank int) error {
					_, err := j.do(rank, float32s(kind, "x", 1<<20))
					return err
				})
				for rank, err := range errs {
					if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), `"x" failed: the server's memory limit is reached`) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
						t.Errorf("rank %d: %v, want the server's memory limit", rank, err)
					}
				}
				j.worksAgain("x", 100000)
			}
		})
	}
}

// worksAgain is works where the servers may still hold memory for answers that are on their way.
func (j *job) worksAgain(name string, n int) {
	j.t.Helper()
	for start := time.Now(); ; {
		err := errors.Join(j.outcomes(func(rank int) error { return j.sums(rank, name, n) })...)
		if err == nil {
			return
		}
		if !errors.Is(err, worker.ErrMemory) || time.Since(start) > hang {
			j.t.Fatal(err)
		}
	}
}
