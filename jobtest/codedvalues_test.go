package jobtest_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// codedValue is a held value of a coded tensor, as one rank sees it.
type codedValue struct {
	j           *jobtest.Job
	rank        int
	name, codec string
	sync        string
	gate        options.Gate
	dtype       units.DType
	op          units.ReduceOp
	n           int
}

// use does an operation on the value and returns what was read.
func (v *codedValue) use(use units.Use, x []float64) ([]float64, error) {
	op := v.make(use, x)
	_, err := v.j.Do(v.rank, op)
	return jobtest.Numbers(v.dtype, op.Output), err
}

func (v *codedValue) make(use units.Use, x []float64) worker.Op {
	op := worker.Op{
		Kind: units.Accumulate, DType: v.dtype, ReduceOp: v.op, Shape: []int64{int64(v.n)}, Name: v.name,
		Declared: options.Declared{Sync: options.Sync{Model: v.sync}, Codec: v.codec, PullGate: v.gate}, Held: worker.Held{Use: use},
	}
	switch {
	case use&units.Add != 0 && x == nil:
		op.Empty = true
	case use&units.Add != 0 || use == units.Declare && v.rank == op.Root:
		op.Input = jobtest.Elements(v.dtype, x)
	}
	if use != units.Add {
		op.Output = make([]byte, v.n*v.dtype.Size())
	}
	return op
}

// Under BSP every rank reads the value with all differences of the iteration, and all ranks the same bits, from any server.
// A rank that is sent deltas has nearly the value, and converges to it when nothing changes any more.
func TestReadersOfCodedValuesComeToTheValue(t *testing.T) {
	const ranks, iterations = 3, 4
	for place, options := range map[string][]jobtest.Option{"embedded": {jobtest.SmallPartitions}, "dedicated": {jobtest.SmallPartitions, jobtest.Dedicated(2)}} {
		t.Run(place, func(t *testing.T) {
			j := jobtest.Start(t, ranks, options...)
			for i, setting := range codecs {
				var seen [iterations][ranks][]float64
				d, op, n := floats[i%4], []units.ReduceOp{units.Sum, units.Average}[i%2], []int{1, 65, jobtest.Partition/4 + 1, 3001}[i%4]
				j.Each(func(rank int) error {
					v := &codedValue{j: j, rank: rank, name: setting, codec: jobtest.CodedBy(setting), dtype: d, op: op, n: n}
					root := jobtest.Numbers(d, jobtest.Elements(d, jobtest.Normal(n, 9)))
					if got, err := v.use(units.Declare, root); err != nil {
						return err
					} else if !slices.Equal(got, root) {
						return fmt.Errorf("%s: declared a value off by %g", setting, norm(got, root))
					}
					for k := range iterations {
						got, err := v.use(units.Add|units.Read, jobtest.Normal(n, uint64(k), uint64(rank)))
						if err != nil {
							return err
						}
						seen[k][rank] = got
					}
					if err := j.Sums(rank, setting+" end", 1); err != nil { // everybody has added all
						return err
					}
					want, err := v.use(units.ReadNow|units.Exact, nil)
					if err != nil {
						return err
					}
					got := want
					for range 40 {
						if got, err = v.use(units.ReadNow, nil); err != nil {
							return err
						}
					}
					if off := norm(got, want) / math.Sqrt(float64(n)); off > 0.05 || strings.HasPrefix(setting, "none") && off > 0 {
						return fmt.Errorf("%s of %d %v: off by %g", setting, n, d, off)
					}
					return nil
				})
				for k, got := range seen {
					for rank := 1; rank < ranks; rank++ {
						if !slices.Equal(got[rank], got[0]) {
							t.Errorf("%s of %d %v, iteration %d: ranks 0 and %d are %g apart", setting, n, d, k, rank, norm(got[0], got[rank]))
						}
					}
				}
			}
		})
	}
}

// The value is the sum of the differences, less the residuals: zero, where everything is sent in time.
func TestDifferencesOfAHeldValueAddUp(t *testing.T) {
	const n, iterations = 2000, 50
	for _, ranks := range []int{2, 3} { // shares that are powers of two, and not
		j := jobtest.Start(t, ranks, jobtest.SmallPartitions, jobtest.Dedicated(1))
		for _, sync := range []string{"", "asp", "ssp:2"} {
			for _, d := range []units.DType{units.Float32, units.Float64} {
				j.Each(func(rank int) error {
					v := &codedValue{j: j, rank: rank, name: fmt.Sprint(sync, d), codec: "topk:0.1", sync: sync, dtype: d, op: units.Average, n: n}
					if _, err := v.use(units.Declare, make([]float64, n)); err != nil {
						return err
					}
					ones := slices.Repeat([]float64{1}, n)
					for range iterations {
						if _, err := v.use(units.Add|units.Read, ones); err != nil {
							return err
						}
					}
					for range 30 { // the rest of the residual
						if _, err := v.use(units.Add, make([]float64, n)); err != nil {
							return err
						}
					}
					if err := j.Sums(rank, v.name+" end", 1); err != nil {
						return err
					}
					got, err := v.use(units.ReadNow|units.Exact, nil)
					if off := norm(got, slices.Repeat([]float64{iterations}, n)); err == nil && off > 1e-3*n {
						err = fmt.Errorf("%q of %v on %d ranks is off by %g", sync, d, ranks, off)
					}
					return err
				})
			}
		}
	}
}

// A read that is given up in the middle concerns its rank alone: the others go on, each with its own reference copy.
func TestAReadOfACodedValueThatIsGivenUp(t *testing.T) {
	const n = 3000
	for _, setting := range []string{"topk:0.1", "fp16"} {
		j := jobtest.Start(t, 3, jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) {
			s.StallShutdown, s.StallWarning = 300*time.Millisecond, 100*time.Millisecond
		}))
		values := make([]*codedValue, 3)
		j.Each(func(rank int) error {
			values[rank] = &codedValue{j: j, rank: rank, name: "w", codec: setting, sync: "ssp:1", dtype: units.Float32, op: units.Sum, n: n}
			_, err := values[rank].use(units.Declare, jobtest.Normal(n, 1))
			return err
		})
		for i := range 3 {
			j.Each(func(rank int) error {
				_, err := values[rank].use(units.Add|units.Read, jobtest.Normal(n, uint64(i), uint64(rank)))
				return err
			})
		}
		if _, err := values[0].use(units.Add|units.Read, jobtest.Normal(n, 5)); err != nil {
			t.Fatal(err)
		}
		if _, err := values[0].use(units.Add|units.Read, jobtest.Normal(n, 5)); err == nil || !strings.Contains(err.Error(), "stalled") {
			t.Fatalf("%v, want a stall", err)
		}
		j.Leave(0)
		for _, v := range values[1:] {
			var got []float64
			for range 40 {
				var err error
				if got, err = v.use(units.ReadNow, nil); err != nil {
					t.Fatal(err)
				}
			}
			want, err := v.use(units.ReadNow|units.Exact, nil)
			if err != nil || norm(got, want) > 0.1 {
				t.Errorf("%s: %v, off by %g", setting, err, norm(got, want))
			}
		}
	}
}

// An empty push closes iterations like any other, and adds nothing.
func TestEmptyPushesCountAndAddNothing(t *testing.T) {
	const n = jobtest.Partition/4 + 5
	for _, options := range [][]jobtest.Option{{jobtest.SmallPartitions}, {jobtest.SmallPartitions, jobtest.Dedicated(1)}, {jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.SumInRankOrder = true })}} {
		j := jobtest.Start(t, 3, options...)
		for _, setting := range []string{"none", "fp16", "onebit:feedback=off"} {
			for _, d := range []units.DType{units.Float32, units.Float16} {
				for _, full := range []int{3, 0, 1} { // ranks whose push is not empty
					j.Each(func(rank int) error {
						op := gradient(fmt.Sprint(setting, d), setting, d, slices.Repeat([]float64{3}, n))
						if rank >= full {
							op.Input, op.Empty = nil, true
						}
						if _, err := j.Do(rank, op); err != nil {
							return err
						}
						if got, want := jobtest.Numbers(d, op.Output), slices.Repeat([]float64{float64(full)}, n); norm(got, want) > 0.01*n {
							return fmt.Errorf("%s of %v with %d of 3: %g…, want %g", setting, d, full, got[0], want[0])
						}
						return nil
					})
				}
			}
			j.Each(func(rank int) error {
				v := &codedValue{j: j, rank: rank, name: "w" + setting, codec: setting, sync: "ssp:0", dtype: units.Float32, op: units.Sum, n: n}
				if _, err := v.use(units.Declare, slices.Repeat([]float64{1}, n)); err != nil {
					return err
				}
				var brings []float64
				if rank == 1 {
					brings = slices.Repeat([]float64{2}, n)
				}
				for range 5 { // 1 and five times 2
					if _, err := v.use(units.Add|units.Read, brings); err != nil {
						return err
					}
				}
				if err := j.Sums(rank, v.name+" end", 1); err != nil {
					return err
				}
				got, err := v.use(units.ReadNow|units.Exact, nil)
				if err == nil && !slices.Equal(got, slices.Repeat([]float64{11}, n)) {
					err = fmt.Errorf("%s: %g…, want 11", setting, got[0])
				}
				return err
			})
		}
		// Reducescatter, and integers.
		j.Each(func(rank int) error {
			op := worker.Op{Kind: units.Reducescatter, DType: units.Int32, ReduceOp: units.Sum, Shape: []int64{3, 7}, Name: "scatter", Output: make([]byte, 28)}
			if op.Empty = rank != 2; !op.Empty {
				op.Input = slices.Repeat([]byte{1, 0, 0, 0}, 21)
			}
			_, err := j.Do(rank, op)
			if err == nil && string(op.Output) != string(slices.Repeat([]byte{1, 0, 0, 0}, 7)) {
				err = fmt.Errorf("reducescatter of empty inputs and one: %v", op.Output)
			}
			return err
		})
		for _, op := range []units.ReduceOp{units.Max, units.Adasum} {
			o := gradient("refused", "", units.Float32, []float64{1})
			o.Input, o.Empty, o.ReduceOp = nil, true, op
			if _, err := j.Do(0, o); err == nil || !strings.Contains(err.Error(), "Sum and Average") {
				t.Errorf("%v: %v", op, err)
			}
		}
	}
}
