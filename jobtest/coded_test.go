package jobtest_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/worker"
)

// codecs are settings of every codec, small enough that sizes cross their blocks.
var codecs = []string{
	"none+s2", "fp16", "bf16+zstd", "int8:block=64", "int4:block=64,feedback=on", "onebit:block=64", "qsgd:levels=7,block=64",
	"qsgd:levels=3,coding=elias", "terngrad:clip=2.5,block=64", "natural:levels=7,block=64", "topk:0.1", "topk:0.25+s2", "randomk:0.25",
	"threshold:0.5", "dgc:0.1,momentum=0.9",
}

var floats = []units.DType{units.Float32, units.Float16, units.BFloat16, units.Float64}

// gradient is the allreduce of a coded tensor.
func gradient(name, setting string, d units.DType, x []float64) worker.Op {
	in := jobtest.Elements(d, x)
	return worker.Op{
		Kind: units.Allreduce, DType: d, ReduceOp: units.Average, Shape: []int64{int64(len(x))}, Input: in, Output: make([]byte, len(in)),
		Name: name, Declared: options.Declared{Codec: setting},
	}
}

// averages has every rank average a tensor of its own, and returns the result, the same bytes on all.
func averages(j *jobtest.Job, name, setting string, d units.DType, x func(rank int) []float64) []float64 {
	j.T.Helper()
	outs := make([][]byte, len(j.Workers))
	j.Each(func(rank int) error {
		op := gradient(name, setting, d, x(rank))
		outs[rank] = op.Output
		_, err := j.Do(rank, op)
		return err
	})
	for rank := range outs {
		if string(outs[rank]) != string(outs[0]) {
			j.T.Fatalf("%s of %v, %d bytes: rank %d has other bytes than rank 0", setting, d, len(outs[0]), rank)
		}
	}
	return jobtest.Numbers(d, outs[0])
}

func mean(ranks int, x func(rank int) []float64) []float64 {
	m := slices.Clone(x(0))
	for rank := 1; rank < ranks; rank++ {
		for i, f := range x(rank) {
			m[i] += f
		}
	}
	for i := range m {
		m[i] /= float64(ranks)
	}
	return m
}

// norm is the length of a - b.
func norm(a, b []float64) float64 {
	var s float64
	for i := range a {
		s += (a[i] - b[i]) * (a[i] - b[i])
	}
	return math.Sqrt(s)
}

var codedSizes = []int{0, 1, 7, 63, 64, 65, 1025}

func TestCodedSumsAreAlikeOnAllRanks(t *testing.T) {
	for _, c := range []struct {
		ranks   int
		options []jobtest.Option
	}{{1, nil}, {2, []jobtest.Option{jobtest.SmallPartitions}}, {2, []jobtest.Option{jobtest.SmallPartitions, jobtest.Dedicated(1)}}, {4, []jobtest.Option{jobtest.SmallPartitions, jobtest.Both(1)}}} {
		j := jobtest.Start(t, c.ranks, c.options...)
		for i, setting := range codecs {
			for k, d := range floats {
				for _, n := range append(codedSizes, 2*jobtest.Partition/4+1) {
					if n > 2000 && (i+k+c.ranks)%4 > 0 { // each codec and type with several partitions somewhere
						continue
					}
					x := func(rank int) []float64 { return jobtest.Normal(n, uint64(n), uint64(rank)) }
					got := averages(j, fmt.Sprint(setting, d, n), jobtest.CodedBy(setting), d, x)
					want := mean(c.ranks, func(rank int) []float64 { return jobtest.Numbers(d, jobtest.Elements(d, x(rank))) })
					if off := norm(got, want); strings.HasPrefix(setting, "none") && off > 0.01*math.Sqrt(float64(n)) || off > 30*math.Sqrt(float64(n)) {
						t.Errorf("%s of %d %v on %d ranks is off by %g", setting, n, d, c.ranks, off)
					}
				}
			}
		}
	}
}

// The sent values and the residuals at both ends add up to the inputs: with feedback the mean of the answers converges to
// the mean of the inputs.
func TestWhatACodecDropsComesLater(t *testing.T) {
	const n, iterations = 3000, 200
	j := jobtest.Start(t, 2, jobtest.Dedicated(1))
	for _, setting := range []string{"topk:0.05", "randomk:0.1", "onebit", "threshold:1.5", "int4:feedback=on"} {
		x := func(rank int) []float64 { return jobtest.Normal(n, 7, uint64(rank)) }
		want := mean(2, x)
		sum := make([]float64, n)
		var first, last float64
		for i := range iterations {
			for e, f := range averages(j, setting, setting, units.Float32, x) {
				sum[e] += f
			}
			last = 0
			for e := range sum {
				last += math.Abs(sum[e]/float64(i+1) - want[e])
			}
			if i == 0 {
				first = last
			}
		}
		if last > first/5 {
			t.Errorf("%s: off by %g after one iteration and by %g after %d", setting, first/n, last/n, iterations)
		}
	}
}

// With inputs of zeros the residuals at both ends become zero: then every input has been sent once.
func TestResidualsRunEmpty(t *testing.T) {
	const n, iterations = jobtest.Partition/4 + 3, 3
	for _, options := range [][]jobtest.Option{{jobtest.SmallPartitions}, {jobtest.SmallPartitions, jobtest.Both(1), jobtest.With(func(s *settings.Settings) { s.SumInRankOrder = true })}} {
		j := jobtest.Start(t, 2, options...)
		for _, setting := range []string{"topk:0.1", "randomk:0.3+s2"} {
			given, sent := make([]float64, n), make([]float64, n)
			for k := range iterations + 45 {
				x := func(rank int) []float64 {
					if k >= iterations {
						return make([]float64, n)
					}
					return jobtest.Normal(n, uint64(k), uint64(rank))
				}
				got := averages(j, setting, setting, units.Float32, x)
				want := mean(2, x)
				for i := range sent {
					sent[i] += got[i]
					given[i] += want[i]
				}
			}
			if off := norm(given, sent); off > 1e-3 {
				t.Errorf("%s: %g of what was given is not what was sent", setting, off)
			}
		}
	}
}

func TestACodedRunRepeatsBitForBit(t *testing.T) {
	run := func(seed int, order []string, places ...jobtest.Option) map[string][]float64 {
		places = append(places, jobtest.SmallPartitions, jobtest.With(func(s *settings.Settings) { s.Seed, s.SumInRankOrder = seed, true }))
		j := jobtest.Start(t, 3, places...)
		got := map[string][]float64{}
		for i := range 3 {
			for _, setting := range order {
				got[setting] = averages(j, setting, setting, units.Float32, func(rank int) []float64 { return jobtest.Normal(2*jobtest.Partition/4+9, uint64(i), uint64(rank)) })
			}
		}
		j.Shutdown()
		return got
	}
	order := []string{"int8", "randomk:0.1", "terngrad", "topk:0.01"}
	first := run(1, order)
	slices.Reverse(order)
	second, other, elsewhere := run(1, order), run(2, order), run(1, order, jobtest.Dedicated(3))
	for _, setting := range order {
		if !slices.Equal(first[setting], second[setting]) {
			t.Errorf("%s differs with the same seed", setting)
		}
		if !slices.Equal(first[setting], elsewhere[setting]) {
			t.Errorf("%s differs where no server is in the process of a worker", setting)
		}
		if setting != "topk:0.01" && slices.Equal(first[setting], other[setting]) {
			t.Errorf("%s is the same with another seed", setting)
		}
	}
}

// The engine and the server do not know what carries their frames.
func TestACodedRunIsTheSameOverTCPAndInMemory(t *testing.T) {
	run := func(places ...jobtest.Option) (got [][]byte) {
		inOrder := jobtest.With(func(s *settings.Settings) { s.SumInRankOrder = true })
		j := jobtest.Start(t, 2, append(places, jobtest.SmallPartitions, inOrder)...)
		for _, setting := range append(codecs, "none") {
			for _, d := range floats {
				x := func(rank int) []float64 { return jobtest.Normal(jobtest.Partition/4+9, 3, uint64(rank)) }
				got = append(got, jobtest.Elements(d, averages(j, fmt.Sprint(setting, d), setting, d, x)))
			}
		}
		return got
	}
	for _, place := range []jobtest.Option{jobtest.Embedded, jobtest.Dedicated(1)} {
		sockets, memory := run(place), run(place, jobtest.InMemory(t))
		for i, b := range sockets {
			if !bytes.Equal(b, memory[i]) {
				t.Errorf("sum %d differs in memory", i)
			}
		}
	}
}

// A label says nothing of the tensor that comes next under it, nor does a place in a sequence or an order.
func TestWhatHasNoNameOfItsOwnKeepsNothing(t *testing.T) {
	const n = 3000
	j := jobtest.Start(t, 2, jobtest.Dedicated(1))
	for _, c := range []struct {
		op    worker.Op
		keeps bool
	}{
		{worker.Op{Name: "of the program"}, true},
		{worker.Op{Name: "a label", Unnamed: true}, false},
		{worker.Op{Sequence: "a sequence"}, false},
		{worker.Op{}, false},
	} {
		for _, setting := range []string{"topk:0.01", "onebit", "int4:feedback=on"} {
			j.Each(func(rank int) error {
				for _, x := range [][]float64{jobtest.Normal(n, 7, uint64(rank)), make([]float64, n)} {
					op := gradient(c.op.Name, setting, units.Float32, x)
					op.Unnamed, op.Sequence = c.op.Unnamed, c.op.Sequence
					if op.Name != "" {
						op.Name += " " + setting
					}
					if _, err := j.Do(rank, op); err != nil {
						return err
					}
					left := slices.ContainsFunc(jobtest.Numbers(units.Float32, op.Output), func(f float64) bool { return f != 0 })
					if x[0] == 0 && left != c.keeps {
						return fmt.Errorf("%q, unnamed %v, of sequence %q, %s: something is left: %v", op.Name, op.Unnamed, op.Sequence, setting, left)
					}
				}
				return nil
			})
		}
	}
}

// Operations other than sums of floating-point numbers are not coded, with any setting.
func TestWhatIsNotCodedTravelsPlain(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.Dedicated(1), jobtest.With(func(s *settings.Settings) { s.Compression = jobtest.CodedBy("onebit") }))
	j.Works("integers", 3000)
	for _, op := range []units.ReduceOp{units.Min, units.Max, units.Product, units.Adasum} {
		j.Each(func(rank int) error {
			o := gradient(op.String(), "", units.Float32, []float64{1, 2, 3})
			o.ReduceOp = op
			if _, err := j.Do(rank, o); err != nil {
				return err
			}
			if x := jobtest.Numbers(units.Float32, o.Output); op != units.Product && !slices.Equal(x, []float64{1, 2, 3}) {
				return fmt.Errorf("%v gives %v", op, x)
			}
			return nil
		})
	}
	x := []float64{1, 2, 3, -4}
	same := func(int) []float64 { return x }
	if got := averages(j, "", "", units.Float32, same); !slices.Equal(got, x) {
		t.Errorf("without a name, and so without a residual: %v", got)
	}
	if got := averages(j, "plain", "none", units.Float32, same); !slices.Equal(got, x) {
		t.Errorf("none: %v", got)
	}
	if got := averages(j, "small", "onebit", units.Float32, same); !slices.Equal(got, x) {
		t.Errorf("fewer than the least elements: %v", got)
	}
	if got := averages(j, "coded", "", units.Float32, same); slices.Equal(got, x) {
		t.Errorf("the job's policy is not heeded: %v", got)
	}
}

func TestRanksThatDisagreeAboutACodecHearOfIt(t *testing.T) {
	j := jobtest.Start(t, 2)
	for rank, err := range j.Outcomes(func(rank int) error {
		_, err := j.Do(rank, gradient("w", []string{"topk:0.01", "fp16"}[rank], units.Float32, jobtest.Normal(2000, 1)))
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "coded by topk:0.01") || !strings.Contains(err.Error(), "coded by fp16") {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	// Texts that mean the same are the same.
	j.Each(func(rank int) error {
		_, err := j.Do(rank, gradient("v", []string{"int8", jobtest.CodedBy("int8:block=512")}[rank], units.Float32, jobtest.Normal(2000, 1)))
		return err
	})
	if _, err := j.Do(0, gradient("x", "topk:7", units.Float32, jobtest.Normal(2000, 1))); err == nil || !strings.Contains(err.Error(), "shares over 0") {
		t.Errorf("%v", err)
	}
}

// Drop-stragglers and reducescatter, coded: all ranks get the same sum of the contributions in time, or their part of it.
func TestCodedSumsOfPartsAndWithoutStragglers(t *testing.T) {
	const rows, columns = 7, jobtest.Partition / 4
	for _, options := range [][]jobtest.Option{{jobtest.SmallPartitions}, {jobtest.SmallPartitions, jobtest.Dedicated(2)}} {
		j := jobtest.Start(t, 3, options...)
		for _, setting := range []string{"none+s2", "int8", "topk:0.5"} {
			outs := make([][]byte, 3)
			for range 3 {
				j.Each(func(rank int) error {
					op := gradient(setting, setting, units.Float32, jobtest.Normal(3000, uint64(rank)))
					op.Sync.Model = "drop-stragglers:2"
					outs[rank] = op.Output
					_, err := j.Do(rank, op)
					return err
				})
				if string(outs[0]) != string(outs[1]) || string(outs[0]) != string(outs[2]) {
					t.Errorf("%s: ranks have other bytes", setting)
				}
			}
			j.Each(func(rank int) error {
				op := gradient(setting+" scattered", setting, units.Float32, slices.Repeat([]float64{float64(rank)}, rows*columns))
				op.Kind, op.Shape = units.Reducescatter, []int64{rows, columns}
				op.Output = make([]byte, []int{3, 2, 2}[rank]*columns*4)
				if _, err := j.Do(rank, op); err != nil {
					return err
				}
				for _, x := range jobtest.Numbers(units.Float32, op.Output) {
					if setting != "topk:0.5" && math.Abs(x-1) > 1e-6 {
						return fmt.Errorf("%s: %g in the mean of 0, 1 and 2", setting, x)
					}
				}
				return nil
			})
		}
	}
}

// Values that are not finite arrive unchanged.
func TestWhatIsNotFiniteArrives(t *testing.T) {
	j := jobtest.Start(t, 2, jobtest.Dedicated(1))
	x := jobtest.Normal(2000, 1)
	x[5], x[1500] = math.NaN(), math.Inf(1)
	for _, setting := range []string{"fp16", "topk:0.01", "int8", "onebit", "randomk:0.1", "threshold:5", "dgc:0.01", "natural+s2"} {
		got := averages(j, setting, setting, units.Float32, func(int) []float64 { return x })
		if !math.IsNaN(got[5]) || !math.IsNaN(got[1500]) && !math.IsInf(got[1500], 1) {
			t.Errorf("%s: %g and %g", setting, got[5], got[1500])
		}
		after := averages(j, setting, setting, units.Float32, func(int) []float64 { return jobtest.Normal(2000, 2) })
		if slices.ContainsFunc(after, func(f float64) bool { return math.IsNaN(f) || math.IsInf(f, 0) }) {
			t.Errorf("%s: what follows is not finite either", setting)
		}
	}
}

// A rank that has joined counts as one whose inputs are zeros. After the join of all ranks everything starts anew.
func TestCodedSumsBesideAJoin(t *testing.T) {
	j := jobtest.Start(t, 3, jobtest.SmallPartitions)
	x := func(int) []float64 { return slices.Repeat([]float64{3}, 2000) }
	for range 2 {
		if got := averages(j, "w", "int8", units.Float32, x); math.Abs(got[0]-3) > 0.1 {
			t.Errorf("%g, want 3", got[0])
		}
		joined := make(chan error, 3)
		join := func(rank int) {
			if err := j.Workers[rank].Engine.Join(func(_ worker.Output, err error) { joined <- err }); err != nil {
				t.Error(err)
			}
		}
		join(2)
		for rank, err := range j.Outcomes(func(rank int) error {
			if rank == 2 {
				return nil
			}
			op := gradient("w", "int8", units.Float32, x(rank))
			_, err := j.Do(rank, op)
			if got := jobtest.Numbers(units.Float32, op.Output)[0]; err == nil && math.Abs(got-2) > 0.1 {
				err = fmt.Errorf("%g, want 2", got)
			}
			return err
		}) {
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		}
		join(0)
		join(1)
		for range 3 {
			if err := <-joined; err != nil {
				t.Error(err)
			}
		}
	}
}

func TestAWrongCompressionIsFoundBeforeTheJobStarts(t *testing.T) {
	for text, want := range map[string]string{
		"topk:7": "shares over 0", "atuo": "topk, and auto", `[{"codec": "fp16", "size": 1}]`: "rule 1", "nowhere/rules.json": "nowhere/rules.json",
	} {
		j := jobtest.New(t, 2, jobtest.With(func(s *settings.Settings) { s.Compression = text }))
		_, err := node.StartWorker(t.Context(), j.Settings, node.Options{Log: j.Log})
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "PACELINE_COMPRESSION: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it to say %q", err, want)
		}
	}
}
