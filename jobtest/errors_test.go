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
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/transport/transporttest"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// mismatches are operations that rank 2 of 3 brings where the others bring an allreduce of float32
// [40000], and what the messages call them.
var mismatches = []struct {
	name  string
	bad   func(op *worker.Op)
	brand string
}{
	{"shape", func(op *worker.Op) { *op = jobtest.Float32s(units.Allreduce, op.Name, 200, 200) }, "allreduce Sum float32 [200, 200]"},
	{"length", func(op *worker.Op) { *op = jobtest.Float32s(units.Allreduce, op.Name, 3) }, "allreduce Sum float32 [3]"},
	{"type", func(op *worker.Op) { op.DType = units.Int32 }, "allreduce Sum int32 [40000]"},
	{"operator", func(op *worker.Op) { op.ReduceOp = units.Max }, "allreduce Max float32 [40000]"},
	{"kind", func(op *worker.Op) { op.Kind = units.Broadcast }, "broadcast float32 [40000] from rank 0"},
	{"another kind", func(op *worker.Op) { *op = jobtest.Float32s(units.Allgather, op.Name, 40000) }, "allgather float32 [*]"},
	{"prescale", func(op *worker.Op) { op.Prescale = 0.5 }, "allreduce Sum float32 [40000] prescale 0.5 postscale 1"},
	{"postscale", func(op *worker.Op) { op.Postscale = 2 }, "allreduce Sum float32 [40000] prescale 1 postscale 2"},
}

// TestRanksThatDisagreeAllGetAnError also goes on after each error, under the same name, with other
// operations in flight all the time.
func TestRanksThatDisagreeAllGetAnError(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.Pairs(2)} {
		j := jobtest.Start(t, 3, jobtest.SmallPartitions, place)
		for _, m := range mismatches {
			for range 3 {
				good := jobtest.Float32s(units.Allreduce, "x", 40000)
				bad := jobtest.Float32s(units.Allreduce, "x", 40000)
				m.bad(&bad)
				disagree(j, m.name, good, bad, "allreduce Sum float32 [40000]", m.brand)
			}
			j.Works("x", 300000)
		}
	}
}

func TestBroadcastsFromDifferentRootsAreAnErrorOnEveryRank(t *testing.T) {
	j := jobtest.Start(t, 3, jobtest.SmallPartitions)
	for range 5 {
		good, bad := jobtest.Float32s(units.Broadcast, "x", 70000), jobtest.Float32s(units.Broadcast, "x", 70000)
		bad.Root = 2
		disagree(j, "root", good, bad, "broadcast float32 [70000] from rank 0", "broadcast float32 [70000] from rank 2")
		j.Works("x", 200)
	}
}

// disagree has rank 2 bring a bad operation and the others a good one. Every rank must get an error that names the tensor,
// the ranks and both signatures; everything else must go on.
func disagree(j *jobtest.Job, what string, good, bad worker.Op, goodBrand, badBrand string) {
	j.T.Helper()
	text := regexp.MustCompile(`^ranks disagree about "x": ranks? [012, ]+ brought (.*), rank [012] brought (.*)$`)
	errs := j.Outcomes(func(rank int) error {
		op := good
		if rank == 2 {
			op = bad
		}
		op.Input = append([]byte(nil), op.Input...)
		op.Output = make([]byte, len(op.Output))
		others, err := j.Submit(rank, jobtest.Sum("beside", 100000), jobtest.Sum("", 70000), jobtest.Sum("", 5))
		if err != nil {
			return fmt.Errorf("beside: %w", err)
		}
		_, failure := j.Do(rank, op)
		for _, o := range others {
			if _, err := jobtest.Await(o, rank, "beside"); err != nil {
				return fmt.Errorf("beside: %w", err)
			}
		}
		return failure
	})
	for rank, err := range errs {
		if !errors.Is(err, worker.ErrMismatch) {
			j.T.Fatalf("%s: rank %d: %v, want a mismatch", what, rank, err)
		}
		found := text.FindStringSubmatch(err.Error())
		if len(found) != 3 || !(found[1] == goodBrand && found[2] == badBrand || found[1] == badBrand && found[2] == goodBrand) {
			j.T.Errorf("%s: rank %d: %q, want what both sides brought: %q and %q", what, rank, err, goodBrand, badBrand)
		}
	}
}

// TestUnnamedOperationsThatDisagree match by their order: the job goes on with the next ones.
func TestUnnamedOperationsThatDisagree(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.SmallPartitions)
	for range 5 {
		errs := j.Outcomes(func(rank int) error {
			_, err := j.Do(rank, jobtest.Sum("", 1000+rank))
			return err
		})
		for rank, err := range errs {
			if !errors.Is(err, worker.ErrMismatch) || !strings.Contains(err.Error(), `"allreduce.noname"`) {
				t.Fatalf("rank %d: %v, want a mismatch of allreduce.noname", rank, err)
			}
		}
		j.Works("", 150000)
	}
}

// TestWhatIsBehindAFailureEndsForItsReason: an operation fails on one rank, and with it those that ranks have begun behind it. All of them end with the
// first reason, on every rank, whichever server and rank each heard of it from.
func TestWhatIsBehindAFailureEndsForItsReason(t *testing.T) {
	const behind, odd = 4, 2
	firsts := []struct {
		name   string
		lates  []int // ranks that begin when the others have heard of it; 3 for none
		reason string
		first  func(j *jobtest.Job, op *worker.Op)
	}{
		{"undeclared", []int{0, 1, 2, 3}, "could not be declared on rank 2: ", func(j *jobtest.Job, op *worker.Op) { op.Set = j.All(); op.Set.Ranks = append(op.Set.Ranks, 3) }},
		{"timeout", []int{0, 1}, "on rank 2 has waited 1s for its end, its timeout", func(_ *jobtest.Job, op *worker.Op) { op.Timeout = time.Second }},
	}
	for what, place := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2), "pairs": jobtest.Pairs(2)} {
		t.Run(what, func(t *testing.T) {
			jobtest.Virtually(t, transporttest.Options{}, func(t *testing.T, network jobtest.Option) {
				j := jobtest.Start(t, 3, jobtest.SmallPartitions, place, network)
				for _, f := range firsts {
					for _, late := range f.lates {
						j.Each(func(rank int) error {
							if rank == late {
								time.Sleep(10 * time.Second)
							}
							var ops []worker.Op
							for range 1 + behind {
								ops = append(ops, jobtest.Sum("", 2*jobtest.Partition))
							}
							if rank == odd {
								f.first(j, &ops[0])
							}
							results, err := j.Submit(rank, ops...)
							if err != nil {
								return err
							}
							for i, result := range results {
								if _, err := jobtest.Await(result, rank, "behind"); err == nil || !strings.Contains(err.Error(), f.reason) {
									t.Errorf("%s, rank %d late: operation %d on rank %d: %v, want %q", f.name, late, i, rank, err, f.reason)
								}
							}
							return nil
						})
						j.Works("", 150000)
					}
				}
			})
		})
	}
}

// TestASequenceHasAnOrderAcrossKinds: operations of one sequence match by their order, several may be in flight, and another
// kind in the place of one is found.
func TestASequenceHasAnOrderAcrossKinds(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.SmallPartitions)
	in := func(sequence string, size int) worker.Op {
		op := jobtest.Sum("", size)
		op.Sequence = sequence
		return op
	}
	barrier := func(sequence string) worker.Op { return worker.Op{Kind: units.Barrier, Sequence: sequence} }
	for rank, err := range j.Outcomes(func(rank int) error {
		sequences := []string{"group 1", "group 2"}
		var results []chan jobtest.Result
		for i := range sequences {
			sequence := sequences[(i+rank)%2] // the order of sequences is free
			some, err := j.Submit(rank, in(sequence, 1000), barrier(sequence), in(sequence, 2000), in(sequence, 1000))
			if err != nil {
				return err
			}
			results = append(results, some...)
		}
		for _, r := range results {
			if _, err := jobtest.Await(r, rank, "of a sequence"); err != nil {
				return err
			}
		}
		return nil
	}) {
		if err != nil {
			t.Fatalf("rank %d: %v", rank, err)
		}
	}
	for rank, err := range j.Outcomes(func(rank int) error {
		op := in("group 1", 1000)
		if rank == 1 {
			op = barrier("group 1")
		}
		_, err := j.Do(rank, op)
		return err
	}) {
		if !errors.Is(err, worker.ErrMismatch) || !strings.Contains(err.Error(), `"group 1"`) {
			t.Fatalf("rank %d: %v, want a mismatch of group 1", rank, err)
		}
	}
	j.Works("", 1000)
}

// TestFailuresDoNotMixUpWhatFollowsThem has several operations of one name in flight behind the one that fails: each of
// them fails on all ranks, or is right on all.
func TestFailuresDoNotMixUpWhatFollowsThem(t *testing.T) {
	j := jobtest.Start(t, 3, jobtest.SmallPartitions)
	for round := range 10 {
		j.Outcomes(func(rank int) error {
			size := 1000
			if rank == round%3 {
				size++
			}
			first, err := j.Submit(rank, jobtest.Sum("", size))
			if err != nil {
				return err
			}
			second, err := j.Submit(rank, jobtest.Sum("", 120000))
			if err != nil {
				return err
			}
			for _, r := range append(first, second...) {
				if _, err := jobtest.Await(r, rank, ""); err != nil && strings.Contains(err.Error(), "hangs") {
					t.Error(err)
				}
			}
			return nil
		})
		j.Works("", 150000)
	}
}

func TestDuplicateNameInFlightIsAnErrorOnThatRankAlone(t *testing.T) {
	j := jobtest.Start(t, 2)
	first, err := j.Submit(0, jobtest.Sum("x", 10))
	if err != nil {
		t.Fatal(err)
	}
	for _, ops := range [][]worker.Op{{jobtest.Sum("x", 10)}, {jobtest.Sum("y", 1), jobtest.Sum("y", 1)}, {jobtest.Sum("y", 1), jobtest.Sum("x", 1)}} {
		_, err = j.Submit(0, ops...)
		if !errors.Is(err, worker.ErrDuplicate) || !strings.Contains(err.Error(), "on rank 0; synchronise it first") {
			t.Fatalf("a second one of the name: %v", err)
		}
	}
	if err := j.Sums(1, "x", 10); err != nil {
		t.Fatal(err)
	}
	if _, err := jobtest.Await(first[0], 0, "x"); err != nil {
		t.Fatal(err)
	}
	j.Works("x", 10)
	j.Works("y", 1)
}

func TestOperationsThatCannotBeAreRefusedWhenSubmitted(t *testing.T) {
	j := jobtest.Start(t, 2)
	half := wire.ProcessSet{ID: 1, Ranks: []int{1}}
	edit := func(op worker.Op, change func(*worker.Op)) worker.Op { change(&op); return op }
	for _, c := range []struct {
		op   worker.Op
		text string
	}{
		{edit(jobtest.Float32s(units.Alltoall, "x", 5), func(*worker.Op) {}), `"x": alltoall without splits needs a first dimension divisible by 2 ranks, not 5`},
		{edit(jobtest.Float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{1} }), `"x": 1 splits for 2 ranks`},
		{edit(jobtest.Float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{-1, 2} }), `"x": splits [-1 2], allowed are 0 to the first dimension, 5`},
		{edit(jobtest.Float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{3, 3} }), `"x": splits [3 3] sum to 6, more than the first dimension, 5`},
		{edit(jobtest.Float32s(units.Alltoall, "x", 5), func(o *worker.Op) { o.Splits = []int64{1 << 62, 1 << 62} }), `allowed are 0 to the first dimension, 5`},
		{edit(jobtest.Float32s(units.Allgather, "x", 5), func(o *worker.Op) { o.Shape, o.Input = nil, o.Input[:4] }), `"x": allgather needs a tensor of at least one dimension`},
		{edit(jobtest.Float32s(units.Reducescatter, "x", 1), func(o *worker.Op) { o.Shape = nil }), `"x": reducescatter needs a tensor of at least one dimension`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.ReduceOp = units.Adasum }), `"x": Adasum is defined for allreduce of floating-point tensors, not for allreduce of uint8`},
		{edit(jobtest.Float32s(units.Reducescatter, "x", 2), func(o *worker.Op) { o.ReduceOp, o.Output = units.Adasum, make([]byte, 4) }), `"x": Adasum is defined for allreduce of floating-point tensors, not for reducescatter of float32`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.DType = units.Bool }), `"x": allreduce of bool tensors is not defined; convert to uint8 first`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Kind, o.DType, o.Output = units.Reducescatter, units.Bool, o.Output[:2] }), `"x": reducescatter of bool tensors is not defined`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Set = half }), `"x": rank 0 is not in process set 1 [1]`},
		{edit(jobtest.Float32s(units.Broadcast, "x", 4), func(o *worker.Op) { o.Root = 2 }), `"x": root rank 2 is not in process set 0 [0 1]`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Shape = []int64{1 << 41} }), fmt.Sprintf(`"x": shape [2199023255552] of uint8 is larger than the limit of %d bytes`, int64(limits.MaxTensor))},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Shape = []int64{1 << 32, 1 << 32} }), `is larger than the limit of`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Shape = []int64{-4} }), `"x": negative dimension in shape [-4]`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Shape = []int64{5} }), `"x": input of 4 bytes for shape [5] of uint8, want 5`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.Output = o.Output[:3] }), `"x": output of 3 bytes, want 4`},
		{edit(jobtest.Sum("x", 1), func(o *worker.Op) { o.Shape = make([]int64, limits.MaxDims+1) }), `"x": 65 dimensions, limit 64`},
		{jobtest.Sum(strings.Repeat("x", limits.MaxName+1), 1), `a name of 4097 bytes, allowed are 1 to 4096`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.PullGate.Threshold = 0.5 }), `"x": a gate for pulls is for held values, not for allreduce`},
		{edit(jobtest.Sum("x", 4), func(o *worker.Op) { o.DType = 77 }), `unknown kind allreduce, type dtype(77)`},
	} {
		_, err := j.Submit(0, jobtest.Sum("beside", 1), c.op)
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("got %q, want it to say %q", err, c.text)
		}
	}
	j.Works("x", 4) // nothing was left behind, of the group's good ones neither
	j.Works("beside", 4)
}
