package jobtest_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
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

// always codes tensors of any size.
func always(setting string) string {
	return fmt.Sprintf(`[{"min_bytes": 0, "codec": %q}]`, setting)
}

// elements writes numbers as a tensor.
func elements(d units.DType, x []float64) []byte {
	var b []byte
	for _, f := range x {
		switch d {
		case units.Float16:
			b = binary.NativeEndian.AppendUint16(b, half.ToFloat16(float32(f)))
		case units.BFloat16:
			b = binary.NativeEndian.AppendUint16(b, half.ToBFloat16(float32(f)))
		case units.Float32:
			b = binary.NativeEndian.AppendUint32(b, math.Float32bits(float32(f)))
		default:
			b = binary.NativeEndian.AppendUint64(b, math.Float64bits(f))
		}
	}
	return b
}

// numbers reads a tensor.
func numbers(d units.DType, b []byte) []float64 {
	x := make([]float64, len(b)/d.Size())
	for i := range x {
		switch d {
		case units.Float16:
			x[i] = float64(half.FromFloat16(binary.NativeEndian.Uint16(b[2*i:])))
		case units.BFloat16:
			x[i] = float64(half.FromBFloat16(binary.NativeEndian.Uint16(b[2*i:])))
		case units.Float32:
			x[i] = float64(math.Float32frombits(binary.NativeEndian.Uint32(b[4*i:])))
		default:
			x[i] = math.Float64frombits(binary.NativeEndian.Uint64(b[8*i:]))
		}
	}
	return x
}

// normal are n numbers that follow from the seed alone.
func normal(n int, seed ...uint64) []float64 {
	random := rand.New(rand.NewPCG(seed[0], seed[len(seed)-1]))
	x := make([]float64, n)
	for i := range x {
		x[i] = random.NormFloat64()
	}
	return x
}

// gradient is the allreduce of a coded tensor.
func gradient(name, setting string, d units.DType, x []float64) worker.Op {
	in := elements(d, x)
	return worker.Op{
		Kind: units.Allreduce, DType: d, ReduceOp: units.Average, Shape: []int64{int64(len(x))}, Input: in, Output: make([]byte, len(in)),
		Name: name, Declared: options.Declared{Codec: setting},
	}
}

// averages has every rank average a tensor of its own, and gives what they got: the same bytes.
func (j *job) averages(name, setting string, d units.DType, x func(rank int) []float64) []float64 {
	j.t.Helper()
	outs := make([][]byte, len(j.workers))
	j.each(func(rank int) error {
		op := gradient(name, setting, d, x(rank))
		outs[rank] = op.Output
		_, err := j.do(rank, op)
		return err
	})
	for rank := range outs {
		if string(outs[rank]) != string(outs[0]) {
			j.t.Fatalf("%s of %v, %d bytes: rank %d has other bytes than rank 0", setting, d, len(outs[0]), rank)
		}
	}
	return numbers(d, outs[0])
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
		options []jobOption
	}{{1, nil}, {2, []jobOption{smallPartitions}}, {2, []jobOption{smallPartitions, dedicated(1)}}, {4, []jobOption{smallPartitions, both(1)}}} {
		j := startJob(t, c.ranks, c.options...)
		for i, setting := range codecs {
			for k, d := range floats {
				for _, n := range append(codedSizes, 2*partition/4+1) {
					if n > 2000 && (i+k+c.ranks)%4 > 0 { // each codec and type with several partitions somewhere
						continue
					}
					x := func(rank int) []float64 { return normal(n, uint64(n), uint64(rank)) }
					got := j.averages(fmt.Sprint(setting, d, n), always(setting), d, x)
					want := mean(c.ranks, func(rank int) []float64 { return numbers(d, elements(d, x(rank))) })
					if off := norm(got, want); strings.HasPrefix(setting, "none") && off > 0.01*math.Sqrt(float64(n)) || off > 30*math.Sqrt(float64(n)) {
						t.Errorf("%s of %d %v on %d ranks is off by %g", setting, n, d, c.ranks, off)
					}
				}
			}
		}
	}
}

// What was sent and the residuals at both ends are all that was given: with feedback the mean of answers comes to
// the mean of what goes in, as iterations go on.
func TestWhatACodecDropsComesLater(t *testing.T) {
	const n, iterations = 3000, 200
	j := startJob(t, 2, dedicated(1))
	for _, setting := range []string{"topk:0.05", "randomk:0.1", "onebit", "threshold:1.5", "int4:feedback=on"} {
		x := func(rank int) []float64 { return normal(n, 7, uint64(rank)) }
		want := mean(2, x)
		sum := make([]float64, n)
		var first, last float64
		for i := range iterations {
			for e, f := range j.averages(setting, setting, units.Float32, x) {
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

// When nothing more is given, the residuals at both ends run empty: then all that was given has been sent, once.
func TestResidualsRunEmpty(t *testing.T) {
	const n, iterations = partition/4 + 3, 3
	for _, options := range [][]jobOption{{smallPartitions}, {smallPartitions, both(1), with(func(s *settings.Settings) { s.SumInRankOrder = true })}} {
		j := startJob(t, 2, options...)
		for _, setting := range []string{"topk:0.1", "randomk:0.3+s2"} {
			given, sent := make([]float64, n), make([]float64, n)
			for k := range iterations + 45 {
				x := func(rank int) []float64 {
					if k >= iterations {
						return make([]float64, n)
					}
					return normal(n, uint64(k), uint64(rank))
				}
				got := j.averages(setting, setting, units.Float32, x)
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
	run := func(seed int, order []string, places ...jobOption) map[string][]float64 {
		places = append(places, smallPartitions, with(func(s *settings.Settings) { s.Seed, s.SumInRankOrder = seed, true }))
		j := startJob(t, 3, places...)
		got := map[string][]float64{}
		for i := range 3 {
			for _, setting := range order {
				got[setting] = j.averages(setting, setting, units.Float32, func(rank int) []float64 { return normal(2*partition/4+9, uint64(i), uint64(rank)) })
			}
		}
		j.shutdown()
		return got
	}
	order := []string{"int8", "randomk:0.1", "terngrad", "topk:0.01"}
	first := run(1, order)
	slices.Reverse(order)
	second, other, elsewhere := run(1, order), run(2, order), run(1, order, dedicated(3))
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
	run := func(places ...jobOption) (got [][]byte) {
		inOrder := with(func(s *settings.Settings) { s.SumInRankOrder = true })
		j := startJob(t, 2, append(places, smallPartitions, inOrder)...)
		for _, setting := range append(codecs, "none") {
			for _, d := range floats {
				x := func(rank int) []float64 { return normal(partition/4+9, 3, uint64(rank)) }
				got = append(got, elements(d, j.averages(fmt.Sprint(setting, d), setting, d, x)))
			}
		}
		return got
	}
	for _, place := range []jobOption{func(*job) {}, dedicated(1)} {
		sockets, memory := run(place), run(place, inMemory(t))
		for i, b := range sockets {
			if !bytes.Equal(b, memory[i]) {
				t.Errorf("sum %d differs in memory", i)
			}
		}
	}
}

// What is no sum of floating-point numbers travels plain, whatever is asked.
func TestWhatIsNotCodedTravelsPlain(t *testing.T) {
	j := startJob(t, 2, dedicated(1), with(func(s *settings.Settings) { s.Compression = always("onebit") }))
	j.works("integers", 3000)
	for _, op := range []units.ReduceOp{units.Min, units.Max, units.Product, units.Adasum} {
		j.each(func(rank int) error {
			o := gradient(op.String(), "", units.Float32, []float64{1, 2, 3})
			o.ReduceOp = op
			if _, err := j.do(rank, o); err != nil {
				return err
			}
			if x := numbers(units.Float32, o.Output); op != units.Product && !slices.Equal(x, []float64{1, 2, 3}) {
				return fmt.Errorf("%v gives %v", op, x)
			}
			return nil
		})
	}
	x := []float64{1, 2, 3, -4}
	same := func(int) []float64 { return x }
	if got := j.averages("", "", units.Float32, same); !slices.Equal(got, x) {
		t.Errorf("without a name, and so without a residual: %v", got)
	}
	if got := j.averages("plain", "none", units.Float32, same); !slices.Equal(got, x) {
		t.Errorf("none: %v", got)
	}
	if got := j.averages("small", "onebit", units.Float32, same); !slices.Equal(got, x) {
		t.Errorf("fewer than the least elements: %v", got)
	}
	if got := j.averages("coded", "", units.Float32, same); slices.Equal(got, x) {
		t.Errorf("the job's policy is not heeded: %v", got)
	}
}

func TestRanksThatDisagreeAboutACodecHearOfIt(t *testing.T) {
	j := startJob(t, 2)
	for rank, err := range j.outcomes(func(rank int) error {
		_, err := j.do(rank, gradient("w", []string{"topk:0.01", "fp16"}[rank], units.Float32, normal(2000, 1)))
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "coded by topk:0.01") || !strings.Contains(err.Error(), "coded by fp16") {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	// Texts that mean the same are the same.
	j.each(func(rank int) error {
		_, err := j.do(rank, gradient("v", []string{"int8", always("int8:block=512")}[rank], units.Float32, normal(2000, 1)))
		return err
	})
	if _, err := j.do(0, gradient("x", "topk:7", units.Float32, normal(2000, 1))); err == nil || !strings.Contains(err.Error(), "shares over 0") {
		t.Errorf("%v", err)
	}
}

func TestTheServersMemoryLimitEndsACodedSum(t *testing.T) {
	j := startJob(t, 2, dedicated(1), smallPartitions, with(func(s *settings.Settings) { s.ServerMemory = 4 * partition }))
	for rank, err := range j.outcomes(func(rank int) error {
		_, err := j.do(rank, gradient("w", "threshold:1e-9", units.Float32, normal(20*partition/4, 1)))
		return err
	}) {
		if !errors.Is(err, worker.ErrMemory) || !strings.Contains(err.Error(), "PACELINE_SERVER_MEMORY") {
			t.Errorf("rank %d: %v, want the memory limit", rank, err)
		}
	}
}

// Drop-stragglers and reducescatter, coded: all ranks get the same sum of those who came in time, each its part.
func TestCodedSumsOfPartsAndWithoutStragglers(t *testing.T) {
	const rows, columns = 7, partition / 4
	for _, options := range [][]jobOption{{smallPartitions}, {smallPartitions, dedicated(2)}} {
		j := startJob(t, 3, options...)
		for _, setting := range []string{"none+s2", "int8", "topk:0.5"} {
			outs := make([][]byte, 3)
			for range 3 {
				j.each(func(rank int) error {
					op := gradient(setting, setting, units.Float32, normal(3000, uint64(rank)))
					op.Sync.Model = "drop-stragglers:2"
					outs[rank] = op.Output
					_, err := j.do(rank, op)
					return err
				})
				if string(outs[0]) != string(outs[1]) || string(outs[0]) != string(outs[2]) {
					t.Errorf("%s: ranks have other bytes", setting)
				}
			}
			j.each(func(rank int) error {
				op := gradient(setting+" scattered", setting, units.Float32, slices.Repeat([]float64{float64(rank)}, rows*columns))
				op.Kind, op.Shape = units.Reducescatter, []int64{rows, columns}
				op.Output = make([]byte, []int{3, 2, 2}[rank]*columns*4)
				if _, err := j.do(rank, op); err != nil {
					return err
				}
				for _, x := range numbers(units.Float32, op.Output) {
					if setting != "topk:0.5" && math.Abs(x-1) > 1e-6 {
						return fmt.Errorf("%s: %g in the mean of 0, 1 and 2", setting, x)
					}
				}
				return nil
			})
		}
	}
}

// What is not finite arrives as such.
func TestWhatIsNotFiniteArrives(t *testing.T) {
	j := startJob(t, 2, dedicated(1))
	x := normal(2000, 1)
	x[5], x[1500] = math.NaN(), math.Inf(1)
	for _, setting := range []string{"fp16", "topk:0.01", "int8", "onebit", "randomk:0.1", "threshold:5", "dgc:0.01", "natural+s2"} {
		got := j.averages(setting, setting, units.Float32, func(int) []float64 { return x })
		if !math.IsNaN(got[5]) || !math.IsNaN(got[1500]) && !math.IsInf(got[1500], 1) {
			t.Errorf("%s: %g and %g", setting, got[5], got[1500])
		}
		after := j.averages(setting, setting, units.Float32, func(int) []float64 { return normal(2000, 2) })
		if slices.ContainsFunc(after, func(f float64) bool { return math.IsNaN(f) || math.IsInf(f, 0) }) {
			t.Errorf("%s: what follows is not finite either", setting)
		}
	}
}

// A rank that has joined counts as one that gives zeros, and all that follows a join of all starts anew.
func TestCodedSumsBesideAJoin(t *testing.T) {
	j := startJob(t, 3, smallPartitions)
	x := func(int) []float64 { return slices.Repeat([]float64{3}, 2000) }
	for range 2 {
		if got := j.averages("w", "int8", units.Float32, x); math.Abs(got[0]-3) > 0.1 {
			t.Errorf("%g, want 3", got[0])
		}
		joined := make(chan error, 3)
		join := func(rank int) {
			if err := j.workers[rank].Engine.Join(func(_ worker.Output, err error) { joined <- err }); err != nil {
				t.Error(err)
			}
		}
		join(2)
		for rank, err := range j.outcomes(func(rank int) error {
			if rank == 2 {
				return nil
			}
			op := gradient("w", "int8", units.Float32, x(rank))
			_, err := j.do(rank, op)
			if got := numbers(units.Float32, op.Output)[0]; err == nil && math.Abs(got-2) > 0.1 {
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
		j := newJob(t, 2, with(func(s *settings.Settings) { s.Compression = text }))
		_, err := node.StartWorker(t.Context(), j.settings, node.Options{Log: j.log})
		if !errors.Is(err, worker.ErrInvalid) || !strings.Contains(err.Error(), "PACELINE_COMPRESSION: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want it to say %q", err, want)
		}
	}
}
