package bench

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"syscall"
	"time"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/rankset"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

const (
	warmUps        = 3
	rounds         = 5 // in which the sizes alternate
	minRepetitions = 2 // in each
	maxRepetitions = 100
)

// rank measures on one rank.
type rank struct {
	w      *node.Worker
	plan   AllreducePlan
	set    wire.ProcessSet
	values values
	room   []byte
}

// MeasureAllreduce carries out the plan on this rank; all ranks of the job must call it with the same plan. The result is the same on all of them. A wrong sum is an error.
func MeasureAllreduce(w *node.Worker, plan AllreducePlan) (AllreduceResult, error) {
	s := &w.Settings
	r := &rank{w: w, plan: plan, values: newValues(plan.DType, s.Rank, s.Size)}
	r.set.Ranks = rankset.Range(len(w.Membership.Now().Workers)).Ranks()
	var room int64
	for _, bytes := range plan.Sizes {
		if bytes < 1 || bytes%int64(plan.DType.Size()) != 0 {
			return AllreduceResult{}, fmt.Errorf("%d bytes are not whole elements of %v", bytes, plan.DType)
		}
		room = max(room, bytes*int64(inARow(bytes)))
	}
	r.room = make([]byte, room)
	rows, err := r.rows()
	if err != nil {
		return AllreduceResult{}, err
	}
	result := AllreduceResult{
		Ranks: s.Size, Servers: s.Servers, DType: plan.DType.String(), Rows: rows,
		PartitionBytes: s.PartitionBytes, CreditBytes: s.CreditBytes, Connections: s.Connections,
	}
	for _, n := range w.Membership.Now().Servers {
		if n.Rank == membership.Dedicated {
			result.NumServers++
		}
	}
	if plan.Idle > 0 {
		result.Idle, err = r.idle()
	}
	return result, err
}

// rows measures the sizes alternately.
func (r *rank) rows() ([]AllreduceRow, error) {
	counts := make([]int, len(r.plan.Sizes)) // repetitions in each round
	for i, bytes := range r.plan.Sizes {
		var err error
		if counts[i], err = r.warmUp(bytes); err != nil {
			return nil, err
		}
	}
	seconds := make([][]float64, len(counts))
	for range rounds {
		for i, bytes := range r.plan.Sizes {
			for range counts[i] {
				took, err := r.repeat(bytes)
				if err != nil {
					return nil, err
				}
				seconds[i] = append(seconds[i], took.Seconds())
			}
		}
	}
	rows := make([]AllreduceRow, len(counts))
	for i, bytes := range r.plan.Sizes {
		slowest, err := r.over(units.Max, seconds[i])
		if err != nil {
			return nil, err
		}
		rows[i] = newRow(bytes, slowest)
	}
	return rows, nil
}

// warmUp finds the number of repetitions of a size that fit in a round; all ranks find the same number.
func (r *rank) warmUp(bytes int64) (int, error) {
	best := time.Duration(math.MaxInt64)
	for range warmUps {
		began := time.Now()
		if _, err := r.repeat(bytes); err != nil {
			return 0, err
		}
		best = min(best, time.Since(began))
	}
	slowest, err := r.over(units.Max, []float64{best.Seconds()})
	if err != nil {
		return 0, err
	}
	fit := r.plan.Duration.Seconds() / rounds / slowest[0]
	return int(min(max(fit, minRepetitions), maxRepetitions)), nil
}

// repeat is one repetition; it returns this rank's time.
func (r *rank) repeat(bytes int64) (time.Duration, error) {
	tensors := slices.Collect(slices.Chunk(r.room[:bytes*int64(inARow(bytes))], int(bytes)))
	for i, t := range tensors {
		r.values.fill(t, i)
	}
	if err := r.do(worker.Op{Kind: units.Barrier, Name: "bench/barrier"}); err != nil {
		return 0, err
	}
	name := fmt.Sprintf("bench/%d", bytes)
	began := time.Now()
	for _, t := range tensors {
		if err := r.allreduce(name, r.plan.DType, units.Sum, t); err != nil {
			return 0, err
		}
	}
	took := time.Since(began)
	for i, t := range tensors {
		if err := r.values.check(t, i); err != nil {
			return 0, fmt.Errorf("all-reduce of %s on rank %d: %w", settings.ShowSize(bytes), r.w.Settings.Rank, err)
		}
	}
	return took, nil
}

// idle measures the idle job.
func (r *rank) idle() (*Idle, error) {
	if err := r.do(worker.Op{Kind: units.Barrier, Name: "bench/barrier"}); err != nil {
		return nil, err
	}
	began, before := time.Now(), cpuSeconds()
	time.Sleep(r.plan.Idle)
	used, took := cpuSeconds()-before, time.Since(began)
	sum, err := r.over(units.Sum, []float64{used})
	if err != nil {
		return nil, err
	}
	return &Idle{Seconds: took.Seconds(), CPUSeconds: sum[0]}, nil
}

// cpuSeconds is this process's CPU time so far.
func cpuSeconds() float64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails only for wrong arguments
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// over reduces a few numbers over the ranks.
func (r *rank) over(op units.ReduceOp, v []float64) ([]float64, error) {
	b := make([]byte, 8*len(v))
	for i, x := range v {
		binary.NativeEndian.PutUint64(b[8*i:], math.Float64bits(x))
	}
	if err := r.allreduce(fmt.Sprintf("bench/%v of %d", op, len(v)), units.Float64, op, b); err != nil {
		return nil, err
	}
	all := make([]float64, len(v))
	for i := range all {
		all[i] = math.Float64frombits(binary.NativeEndian.Uint64(b[8*i:]))
	}
	return all, nil
}

func (r *rank) allreduce(name string, d units.DType, op units.ReduceOp, tensor []byte) error {
	return r.do(worker.Op{
		Kind: units.Allreduce, DType: d, ReduceOp: op, Name: name, Prescale: 1, Postscale: 1,
		Shape: []int64{int64(len(tensor) / d.Size())}, Input: tensor, Output: tensor,
	})
}

// do runs one operation and waits for its end.
func (r *rank) do(op worker.Op) error {
	done := make(chan error, 1)
	op.Set = r.set
	op.Done = func(_ worker.Output, err error) { done <- err }
	if err := r.w.Engine.Submit([]worker.Op{op}); err != nil {
		return err
	}
	return <-done
}
