package jobtest_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

// TestAnExchangeLeavesNoGarbage: workers and servers of a whole job, in steady state, over sockets; sums that travel in a batch, and
// large ones in several partitions. What AllocsPerRun counts are the objects of the whole process.
func TestAnExchangeLeavesNoGarbage(t *testing.T) {
	if race || invariant.On {
		t.Skip("the checks of these builds take memory")
	}
	start := func(where jobtest.Option) func(*testing.T, int) *jobtest.Job {
		return func(t *testing.T, ranks int) *jobtest.Job { return jobtest.Start(t, ranks, where) }
	}
	staged := func(t *testing.T, ranks int) *jobtest.Job {
		j, _ := lending(t, ranks, ranks, false, jobtest.Embedded)
		return j
	}
	for _, c := range []struct {
		ranks, tensors, floats int
		start                  func(t *testing.T, ranks int) *jobtest.Job
		where                  string
	}{
		{2, 122, 1 << 10, start(jobtest.Embedded), "embedded"}, {2, 4, 2 << 20, start(jobtest.Embedded), "embedded"},
		{4, 122, 1 << 10, start(jobtest.Embedded), "embedded"}, {4, 122, 8 << 10, start(jobtest.Pairs(2)), "summed by host"},
		{4, 4, 1 << 19, start(jobtest.Pairs(1)), "summed by host"}, {2, 4, 2 << 20, staged, "staged"}, {4, 122, 8 << 10, staged, "staged"},
	} {
		t.Run(fmt.Sprintf("%d ranks, %d tensors of %d, %s", c.ranks, c.tensors, c.floats, c.where), func(t *testing.T) {
			j := c.start(t, c.ranks)
			ranks := make([]func(), c.ranks)
			for rank := range ranks {
				ranks[rank] = stepOf(j, rank, c.tensors, c.floats)
			}
			var ends sync.WaitGroup
			begin := make([]chan struct{}, c.ranks)
			for rank := range begin {
				begin[rank] = make(chan struct{})
				t.Cleanup(func() { close(begin[rank]) })
				go func() {
					for range begin[rank] {
						ranks[rank]()
						ends.Done()
					}
				}()
			}
			step := func() {
				ends.Add(c.ranks)
				for _, b := range begin {
					b <- struct{}{}
				}
				ends.Wait()
			}
			for range 30 { // until lists and pools have their sizes
				step()
			}
			const steps = 100
			begun := time.Now()
			objects := testing.AllocsPerRun(steps, step)
			// Pushes of two ranks for one key that meet by chance take a second list, a collection empties pools, and
			// who looks for stalls once a second makes lists.
			looks := 100 * time.Since(begun).Seconds() / steps
			if exchanges := c.ranks * c.tensors; objects > float64(max(2, exchanges/50))+looks {
				t.Errorf("%v objects for %d exchanges", objects, exchanges)
			}
		})
	}
}

// stepOf is the reduction of all tensors on one rank, submitted and awaited together.
func stepOf(j *jobtest.Job, rank, tensors, floats int) func() {
	var pending sync.WaitGroup
	var failed error
	ops := make([]worker.Op, tensors)
	for i := range ops {
		memory := make([]byte, 4*floats)
		ops[i] = worker.Op{
			Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Set: j.All(), Shape: []int64{int64(floats)},
			Input: memory, Output: memory, Prescale: 1, Postscale: 1, Priority: -i, Name: fmt.Sprintf("tensor.%d", i),
			Done: func(_ worker.Output, err error) {
				if err != nil {
					failed = err
				}
				pending.Done()
			},
		}
	}
	e := j.Workers[rank].Engine
	return func() {
		pending.Add(tensors)
		if err := e.Submit(ops); err != nil {
			j.T.Error(err)
			pending.Add(-tensors)
		}
		e.Flush(true)
		if pending.Wait(); failed != nil {
			j.T.Error(failed)
		}
	}
}
