package jobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// Result is the end of an operation.
type Result struct {
	Out worker.Output
	Err error
}

// Submit starts one group of operations on a rank. Each gives one result.
func (j *Job) Submit(rank int, ops ...worker.Op) ([]chan Result, error) {
	results := make([]chan Result, len(ops))
	for i := range ops {
		op, done := &ops[i], make(chan Result, 1)
		results[i] = done
		op.Done = func(out worker.Output, err error) { done <- Result{out, err} }
		if op.Set.Ranks == nil {
			op.Set = j.All()
		}
		if op.Prescale == 0 && op.Postscale == 0 {
			op.Prescale, op.Postscale = 1, 1
		}
	}
	return results, j.Workers[rank].Engine.Submit(ops)
}

// Do submits one operation on a rank and waits for it.
func (j *Job) Do(rank int, op worker.Op) (worker.Output, error) {
	results, err := j.Submit(rank, op)
	if err != nil {
		return worker.Output{}, err
	}
	return Await(results[0], rank, op.Name)
}

// Await waits for the result of an operation of a rank. More than Hang is an error.
func Await(done <-chan Result, rank int, name string) (worker.Output, error) {
	select {
	case r := <-done:
		return r.Out, r.Err
	case <-time.After(Hang):
		return worker.Output{}, fmt.Errorf("rank %d: %q hangs", rank, name)
	}
}

// Outcomes runs f on every running rank concurrently, and returns the errors.
func (j *Job) Outcomes(f func(rank int) error) []error {
	var wg sync.WaitGroup
	errs := make([]error, len(j.Workers))
	for rank, w := range j.Workers {
		if w != nil {
			wg.Go(func() { errs[rank] = f(rank) })
		}
	}
	wg.Wait()
	return errs
}

// Each is Outcomes where none may fail.
func (j *Job) Each(f func(rank int) error) {
	j.T.Helper()
	for rank, err := range j.Outcomes(f) {
		if err != nil {
			j.T.Fatalf("rank %d: %v", rank, err)
		}
	}
}

// Sum is the allreduce of n bytes under a name, in place: all ones, so that the result counts the ranks.
func Sum(name string, n int) worker.Op {
	buf := bytes.Repeat([]byte{1}, n)
	return worker.Op{Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Shape: []int64{int64(n)}, Input: buf, Output: buf, Name: name}
}

// Works checks that all ranks can do a sum of n bytes under a name.
func (j *Job) Works(name string, n int) {
	j.T.Helper()
	j.Each(func(rank int) error { return j.Sums(rank, name, n) })
}

// Sums has a rank do its part of Works.
func (j *Job) Sums(rank int, name string, n int) error {
	op := Sum(name, n)
	if _, err := j.Do(rank, op); err != nil {
		return err
	}
	if want := byte(len(j.Workers)); bytes.Count(op.Output, []byte{want}) != n {
		i := slices.IndexFunc(op.Output, func(v byte) bool { return v != want })
		return fmt.Errorf("element %d of %q is %d, want %d", i, name, op.Output[i], want)
	}
	return nil
}

// WorksAgain is Works while the servers may still hold memory for answers in flight.
func (j *Job) WorksAgain(name string, n int) {
	j.T.Helper()
	for start := time.Now(); ; {
		err := errors.Join(j.Outcomes(func(rank int) error { return j.Sums(rank, name, n) })...)
		if err == nil {
			return
		}
		if !errors.Is(err, worker.ErrMemory) || time.Since(start) > Hang {
			j.T.Fatal(err)
		}
	}
}

// Float32s is an operation on so many float32 of value one.
func Float32s(kind units.Kind, name string, shape ...int64) worker.Op {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	in := bytes.Repeat(AppendElement(nil, units.Float32, 1), int(n))
	op := worker.Op{Kind: kind, DType: units.Float32, ReduceOp: units.Sum, Shape: shape, Input: in, Name: name, Prescale: 1, Postscale: 1}
	if kind == units.Allreduce || kind == units.Broadcast {
		op.Output = in
	}
	return op
}

// Join joins a rank, waits for the others, and returns the last rank that joined.
func (j *Job) Join(rank int) (int, error) {
	done := make(chan Result, 1)
	if err := j.Workers[rank].Engine.Join(func(out worker.Output, err error) { done <- Result{out, err} }); err != nil {
		return 0, err
	}
	out, err := Await(done, rank, "join")
	return out.Value, err
}

// AddSet makes a process set.
func (j *Job) AddSet(ranks []int) wire.ProcessSet {
	j.T.Helper()
	var mu sync.Mutex
	var set wire.ProcessSet
	j.Each(func(rank int) error {
		ctx, cancel := context.WithTimeout(j.T.Context(), Hang)
		defer cancel()
		s, err := j.Workers[rank].Control.AddSet(ctx, ranks)
		mu.Lock()
		defer mu.Unlock()
		set = s
		return err
	})
	return set
}
