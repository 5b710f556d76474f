package jobtest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// submission is one call of Submit: one operation, or a group.
type submission []*collective

// play runs operations on all ranks of their sets, all in flight together. Every rank submits them in
// an order of its own, but for those without a name, which match by their order.
func play(j *jobtest.Job, seed uint64, program []submission) {
	j.T.Helper()
	for _, s := range program {
		for _, c := range s {
			c.prepare()
		}
	}
	errs := j.Outcomes(func(rank int) error { return playOn(j, rank, seed, program) })
	for rank, err := range errs {
		if err != nil {
			j.T.Fatalf("rank %d, seed %d: %v", rank, seed, err)
		}
	}
}

func playOn(j *jobtest.Job, rank int, seed uint64, program []submission) error {
	type flight struct {
		c      *collective
		member int
		op     worker.Op
		done   chan jobtest.Result
	}
	var flights []flight
	for _, i := range order(rand.New(rand.NewPCG(seed, uint64(rank))), program) {
		var ops []worker.Op
		for _, c := range program[i] {
			if member := slices.Index(c.set.Ranks, rank); member >= 0 {
				ops = append(ops, c.operation(member))
				flights = append(flights, flight{c: c, member: member, op: ops[len(ops)-1]})
			}
		}
		if len(ops) == 0 {
			continue
		}
		results, err := j.Submit(rank, ops...)
		if err != nil {
			return err
		}
		for k, r := range results {
			flights[len(flights)-len(results)+k].done = r
		}
	}
	for _, f := range flights {
		out, err := jobtest.Await(f.done, rank, f.c.String())
		if err != nil {
			return fmt.Errorf("%v: %w", f.c, err)
		}
		if err := f.c.check(f.member, &f.op, out); err != nil {
			return err
		}
	}
	return nil
}

// order is a random order of the program in which unnamed operations keep theirs.
func order(random *rand.Rand, program []submission) []int {
	shuffled := random.Perm(len(program))
	var places, unnamed []int
	for at, i := range shuffled {
		if program[i][0].name == "" {
			places, unnamed = append(places, at), append(unnamed, i)
		}
	}
	slices.Sort(unnamed)
	for k, at := range places {
		shuffled[at] = unnamed[k]
	}
	return shuffled
}

var reductions = []units.ReduceOp{units.Sum, units.Average, units.Min, units.Max, units.Product, units.Adasum}

// grid makes every collective of every type and operator on tensors of n elements per rank.
func grid(set wire.ProcessSet, elements int64) []*collective {
	var all []*collective
	add := func(c *collective) {
		c.set, c.seed, c.name = set, len(all), fmt.Sprint(set.ID, " ", c.kind, " ", c.dtype, " ", c.op, " ", elements)
		if c.pre == 0 {
			c.pre, c.post = 1, 1
		}
		all = append(all, c)
	}
	members := len(set.Ranks)
	rows := func(f func(m int) int64) []int64 {
		r := make([]int64, members)
		for m := range r {
			r[m] = f(m)
		}
		return r
	}
	alike := rows(func(int) int64 { return elements })
	for _, d := range units.DTypes() {
		for i, op := range reductions {
			if d == units.Bool || op == units.Adasum && !d.Float() {
				continue
			}
			scaled := &collective{kind: units.Allreduce, dtype: d, op: op, rows: alike, pre: 1, post: 1}
			if i%2 == 0 {
				scaled.pre, scaled.post = 0.5, 3
			}
			add(scaled)
			if op != units.Adasum {
				add(&collective{kind: units.Reducescatter, dtype: d, op: op, rows: alike})
			}
		}
		add(&collective{kind: units.Broadcast, dtype: d, op: units.Sum, rows: alike, root: set.Ranks[len(all)%members]})
		add(&collective{kind: units.Allgather, dtype: d, rows: rows(func(m int) int64 { return elements * int64(m%3) / 2 })})
		even := rows(func(int) int64 { return elements / int64(members) * int64(members) })
		add(&collective{kind: units.Alltoall, dtype: d, op: units.Sum, rows: even})
		uneven := &collective{kind: units.Alltoall, dtype: d, op: units.Average, rows: alike}
		for m := range members {
			uneven.splits = append(uneven.splits, unevenSplits(elements, members, m))
		}
		add(uneven)
	}
	add(&collective{kind: units.Barrier, rows: make([]int64, members)})
	return all
}

// unevenSplits divides rows among the members unequally: some shares are empty, and one row is left over.
func unevenSplits(rows int64, members, member int) []int64 {
	splits := make([]int64, members)
	left := max(rows-1, 0)
	for i := range splits {
		splits[i] = left * int64((i+member)%3) / 3
		left -= splits[i]
	}
	return splits
}

// TestEveryCollectiveEqualsTheReference runs the grid: kind × type × operator × length × world size ×
// where the servers are. Partitions are small, so that tensors have many.
func TestEveryCollectiveEqualsTheReference(t *testing.T) {
	places := []struct {
		name   string
		option jobtest.Option
	}{{"embedded", jobtest.Embedded}, {"dedicated", jobtest.Dedicated(2)}, {"both", jobtest.Both(1)}, {"pairs", jobtest.Pairs(2)}}
	for _, n := range []int{1, 2, 3, 4, 8} {
		for i, place := range places {
			if race && (n == 1 || n == 8 || i != n%4) {
				continue
			}
			t.Run(fmt.Sprintf("%d ranks %s", n, place.name), func(t *testing.T) {
				j := jobtest.Start(t, n, place.option, jobtest.SmallPartitions)
				seed := uint64(time.Now().UnixNano())
				random := rand.New(rand.NewPCG(seed, 0))
				var all []*collective
				for _, elements := range []int64{0, 1, 37} {
					all = append(all, grid(j.All(), elements)...)
				}
				all = append(all, atPartitionBounds(j.All(), random)...)
				random.Shuffle(len(all), func(a, b int) { all[a], all[b] = all[b], all[a] })
				for batch := range slices.Chunk(all, 60) {
					play(j, seed, singles(batch, random))
				}
			})
		}
	}
}

// atPartitionBounds makes collectives whose tensors are an element shorter than a partition, equal to one, an element
// longer, and several partitions long. It picks a random third of them, to save time.
func atPartitionBounds(set wire.ProcessSet, random *rand.Rand) []*collective {
	var some []*collective
	for size := 1; size <= 8; size *= 2 {
		for _, elements := range []int{jobtest.Partition/size - 1, jobtest.Partition / size, jobtest.Partition/size + 1, 3*jobtest.Partition/size + 5} {
			for _, c := range grid(set, int64(elements)) {
				if c.dtype.Size() == size && random.IntN(3*(1+9*b2i(race))) == 0 {
					some = append(some, c)
				}
			}
		}
	}
	return some
}

// singles submits each operation alone, at a random priority.
func singles(all []*collective, random *rand.Rand) []submission {
	program := make([]submission, len(all))
	for i, c := range all {
		c.priority = random.IntN(5) - 2
		program[i] = submission{c}
	}
	return program
}

// TestTensorsOfSeveralDimensions has rows of more than one element, where shares follow the rows.
func TestTensorsOfSeveralDimensions(t *testing.T) {
	j := jobtest.Start(t, 3, jobtest.SmallPartitions)
	var program []submission
	for _, kind := range []units.Kind{units.Allreduce, units.Allgather, units.Broadcast, units.Alltoall, units.Reducescatter} {
		for _, rows := range []int64{0, 3, 6, 9000} {
			program = append(program, submission{{kind: kind, dtype: units.Float32, op: units.Sum, set: j.All(), root: 1,
				name: fmt.Sprint(kind, rows), rows: []int64{rows, rows, rows}, width: 5, pre: 1, post: 1}})
		}
	}
	play(j, 1, program)
}

// TestUnnamedAndGroupedOperationsInFlightTogether also repeats names from round to round, as training
// does.
func TestUnnamedAndGroupedOperationsInFlightTogether(t *testing.T) {
	j := jobtest.Start(t, 4, jobtest.SmallPartitions)
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	for range 10 - 7*b2i(race) {
		var program []submission
		for i := range 40 {
			var group submission
			for k := range 1 + i%4 {
				c := &collective{kind: units.Allreduce, dtype: units.Float32, op: units.Sum, set: j.All(), seed: random.IntN(100), priority: -i,
					rows: slices.Repeat([]int64{int64(random.IntN(2) * 40000)}, 4), pre: 1, post: 1}
				if i%2 == 0 {
					c.name = fmt.Sprintf("layer %d.%d of %d", i, k, c.rows[0])
				}
				group = append(group, c)
			}
			program = append(program, group)
		}
		play(j, seed, program)
	}
}

// TestProcessSetsWorkBesideEachOther also has one name in several sets, which are different tensors.
func TestProcessSetsWorkBesideEachOther(t *testing.T) {
	j := jobtest.Start(t, 4, jobtest.SmallPartitions)
	sets := []wire.ProcessSet{j.All()}
	for _, ranks := range [][]int{{0, 2}, {1, 3}, {1, 2, 3}, {2}} {
		sets = append(sets, j.AddSet(ranks))
	}
	seed := uint64(time.Now().UnixNano())
	random := rand.New(rand.NewPCG(seed, 0))
	var program []submission
	for _, set := range sets {
		for _, elements := range []int64{13, 40000} {
			for _, c := range grid(set, elements) {
				if c.dtype == units.Float32 {
					c.name = fmt.Sprint(c.kind, c.op, elements)
					program = append(program, singles([]*collective{c}, random)...)
				}
			}
		}
	}
	play(j, seed, program)
}

// TestLargeTensors has 64 MiB, once, in partitions of the default size.
func TestLargeTensors(t *testing.T) {
	if race {
		t.Skip("the race detector finds nothing here that it does not find in smaller tensors")
	}
	jobtest.Start(t, 2).Works("large", 64<<20)
	jobtest.Start(t, 3, jobtest.Dedicated(2)).Works("large", 64<<20)
}

// TestRanksEndBitIdentical sums numbers whose sum depends on the order of additions.
func TestRanksEndBitIdentical(t *testing.T) {
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Pairs(2)} {
		j := jobtest.Start(t, 4, jobtest.SmallPartitions, place)
		for i := range 20 {
			results := sumOfRandoms(j, fmt.Sprint("x", i%3), 50000)
			for rank, r := range results {
				if !bytes.Equal(r, results[0]) {
					t.Fatalf("ranks 0 and %d got different bits", rank)
				}
			}
		}
	}
}

func TestSumsInRankOrderRepeatBitForBit(t *testing.T) {
	inOrder := jobtest.With(func(s *settings.Settings) { s.SumInRankOrder = true })
	var first []byte
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(2), jobtest.InMemory(t)} {
		j := jobtest.Start(t, 4, jobtest.SmallPartitions, inOrder, place)
		for range 10 {
			for _, r := range sumOfRandoms(j, "x", 50000) {
				if first == nil {
					first = r
				}
				if !bytes.Equal(r, first) {
					t.Fatal("a second run gave other bits")
				}
			}
		}
	}
}

// sumOfRandoms sums random float32 numbers, the same ones at every call.
func sumOfRandoms(j *jobtest.Job, name string, n int) [][]byte {
	j.T.Helper()
	results := make([][]byte, len(j.Workers))
	j.Each(func(rank int) error {
		b := jobtest.NormalFloats(n, 7, uint64(rank))
		results[rank] = b
		_, err := j.Do(rank, worker.Op{Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Average, Shape: []int64{int64(n)}, Input: b, Output: b, Name: name})
		return err
	})
	return results
}
