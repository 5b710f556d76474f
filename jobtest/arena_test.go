package jobtest_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/zap"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/shm"
	"github.com/paceline/paceline/transport/tcp"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// lending starts a job over shared memory of which the first ranks, so many, have arenas. The last rank may be elsewhere: it reaches
// the others by TCP.
func lending(t *testing.T, ranks, lenders int, elsewhere bool, options ...jobtest.Option) (j *jobtest.Job, arenas []*shm.Arena) {
	arenas = make([]*shm.Arena, ranks)
	for rank := range lenders {
		var err error
		if arenas[rank], err = shm.NewArena(); err != nil {
			t.Fatal(err)
		}
	}
	over := func(rank int) *transport.Set {
		common := tcp.New(tcp.Config{Secret: []byte(jobtest.Secret)})
		if elsewhere && rank == ranks-1 {
			return transport.NewSet(nil, common)
		}
		config := shm.Config{Secret: []byte(jobtest.Secret), Ring: 512 << 10}
		if rank >= 0 {
			config.Arena = arenas[rank]
		}
		near, err := shm.New(config)
		if err != nil {
			t.Fatal(err)
		}
		return transport.NewSet(zap.NewNop(), near, common)
	}
	return jobtest.Start(t, ranks, append(options, jobtest.SmallPartitions, jobtest.Transports(over))...), arenas
}

// sumsIn has every rank sum n float32, in its arena if it has one, and checks the results.
func sumsIn(j *jobtest.Job, arenas []*shm.Arena, name string, n int, of units.ReduceOp, dtype units.DType) {
	j.T.Helper()
	j.Each(func(rank int) error {
		in := slices.Repeat(jobtest.Elements(dtype, []float64{float64(rank + 1)}), n)
		memory := in
		if arenas[rank] != nil {
			memory = arenas[rank].Alloc(len(in))
			defer arenas[rank].Free(unsafe.Pointer(&memory[0]))
			copy(memory, in)
		}
		op := worker.Op{Kind: units.Allreduce, DType: dtype, ReduceOp: of, Shape: []int64{int64(n)}, Input: memory, Output: memory, Name: name}
		if _, err := j.Do(rank, op); err != nil {
			return err
		}
		ranks := float64(len(j.Workers))
		want := map[units.ReduceOp]float64{units.Sum: ranks * (ranks + 1) / 2, units.Average: (ranks + 1) / 2, units.Max: ranks, units.Adasum: jobtest.Element(dtype, memory)}[of]
		if !bytes.Equal(memory, slices.Repeat(jobtest.Elements(dtype, []float64{want}), n)) {
			return fmt.Errorf("not all elements of %q are %v: %v", name, want, slices.Compact(jobtest.Numbers(dtype, memory)))
		}
		return nil
	})
}

// TestPushesOfHostsAreScaledAsTheyAreBesideMemoryThatIsLent has a rank on the server's host, which lends, beside a host that sums first and pushes
// its mean (float16) or a sum that has been scaled.
func TestPushesOfHostsAreScaledAsTheyAreBesideMemoryThatIsLent(t *testing.T) {
	hosts := jobtest.OnHosts(func(rank int) string {
		if rank == 0 {
			return hostname(t)
		}
		return "pair"
	})
	j, arenas := lending(t, 3, 1, false, jobtest.Dedicated(1), hosts)
	for _, c := range []struct {
		dtype    units.DType
		op       units.ReduceOp
		prescale float64
		want     float64
	}{
		{units.Float16, units.Average, 1, 3},
		{units.Float16, units.Average, 0.5, 1.5},
		{units.Float32, units.Sum, 0.5, 4.5},
		{units.Float32, units.Average, 0.5, 1.5},
		{units.Float32, units.Max, 2, 12},
	} {
		const n = 100_000
		lends := make(chan struct{})
		j.Each(func(rank int) error {
			in := slices.Repeat(jobtest.Elements(c.dtype, []float64{[]float64{1, 2, 6}[rank]}), n)
			if rank == 0 {
				memory := arenas[0].Alloc(len(in))
				defer arenas[0].Free(unsafe.Pointer(&memory[0]))
				copy(memory, in)
				in = memory
				time.AfterFunc(100*time.Millisecond, func() { close(lends) }) // the others' come later
			} else {
				<-lends
			}
			op := worker.Op{Kind: units.Allreduce, DType: c.dtype, ReduceOp: c.op, Shape: []int64{n}, Input: in, Output: in,
				Name: fmt.Sprint(c), Prescale: c.prescale, Postscale: 1}
			if _, err := j.Do(rank, op); err != nil {
				return err
			}
			if got := slices.Compact(jobtest.Numbers(c.dtype, in)); !slices.Equal(got, []float64{c.want}) {
				return fmt.Errorf("%v %v with prescale %v: %v, want %v", c.op, c.dtype, c.prescale, got, c.want)
			}
			return nil
		})
	}
}

func TestSumsOfLentMemoryDoNotTravel(t *testing.T) {
	const n = 300_000
	for name, servers := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2)} {
		t.Run(name, func(t *testing.T) {
			j, arenas := lending(t, 3, 3, false, servers)
			for range 3 {
				for _, of := range []units.ReduceOp{units.Sum, units.Average, units.Max, units.Adasum} {
					sumsIn(j, arenas, fmt.Sprint(of), n, of, units.Float32)
				}
				sumsIn(j, arenas, "half", n, units.Average, units.Float16)
				sumsIn(j, arenas, "small", 1, units.Sum, units.Float64)
			}
			for rank, w := range j.Workers {
				if sent := w.Engine.Progress().Sent; sent > n {
					t.Errorf("rank %d has sent %d bytes of tensors", rank, sent)
				}
			}
		})
	}
}

func TestRanksThatLendSumWithOthers(t *testing.T) {
	for i := range 3 * 2 * 2 {
		lenders, elsewhere, elastic := i/4, i%2 == 1, i/2%2 == 1
		t.Run(fmt.Sprintf("%d of 3 lend, one elsewhere %v, elastic %v", lenders, elsewhere, elastic), func(t *testing.T) {
			j, arenas := lending(t, 3, lenders, elsewhere, jobtest.With(func(s *settings.Settings) { s.Elastic = elastic }))
			for range 3 {
				j.Works("elsewhere", 100_000) // of no arena
				sumsIn(j, arenas, "sum", 100_000, units.Sum, units.Float32)
				sumsIn(j, arenas, "half", 100_000, units.Average, units.Float16)
			}
		})
	}
}

// An operation on lent memory that ranks disagree about ends on all of them, and nobody writes there afterwards.
func TestLentMemoryComesBackFromSumsThatFail(t *testing.T) {
	j, arenas := lending(t, 3, 3, false)
	for round := range 20 {
		for rank, err := range j.Outcomes(func(rank int) error {
			n := 100_000
			if rank == round%3 {
				n = 90_000
			}
			memory := arenas[rank].Alloc(4 * n)
			defer arenas[rank].Free(unsafe.Pointer(&memory[0]))
			op := jobtest.Float32s(units.Allreduce, "x", int64(n))
			op.Input, op.Output = memory, memory
			_, err := j.Do(rank, op)
			for i := range memory {
				memory[i] = 7
			}
			sum := jobtest.Float32s(units.Allreduce, "behind", 10)
			if _, err := j.Do(rank, sum); err != nil {
				return err
			}
			if i := slices.IndexFunc(memory, func(b byte) bool { return b != 7 }); i >= 0 {
				return fmt.Errorf("byte %d was written after the operation had failed", i)
			}
			return err
		}) {
			if !errors.Is(err, worker.ErrMismatch) {
				t.Fatalf("rank %d: %v, want a mismatch", rank, err)
			}
		}
		sumsIn(j, arenas, "x", 100_000, units.Sum, units.Float32)
	}
}

// A rank whose sum in place will never be complete, because another is gone, gets its memory back with the error.
func TestSumsInPlaceEndWhereARankIsLost(t *testing.T) {
	j, arenas := lending(t, 3, 3, false)
	memory := make([][]byte, 3)
	results := make([]chan jobtest.Result, 3)
	for rank := range 2 {
		memory[rank] = arenas[rank].Alloc(4 << 20)
		op := jobtest.Float32s(units.Allreduce, "x", 1<<20)
		op.Input, op.Output = memory[rank], memory[rank]
		submitted, err := j.Submit(rank, op)
		if err != nil {
			t.Fatal(err)
		}
		results[rank] = submitted[0]
	}
	j.Workers[2].Engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 2, Why: "of a test"})
	for rank := range 2 {
		if _, err := jobtest.Await(results[rank], rank, "x"); !errors.Is(err, worker.ErrPeerLost) {
			t.Errorf("rank %d: %v, want that of a lost peer", rank, err)
		}
	}
}

// Sums of ordinary memory lie in the arena while they are on their way (decision 103), and no longer than the job. So do the answers that an elastic job keeps (decision 129).
func TestOrdinaryMemoryIsStagedInTheArena(t *testing.T) {
	const n = 320 << 10 // whole partitions
	for name, options := range map[string][]jobtest.Option{
		"embedded": {jobtest.Embedded}, "dedicated": {jobtest.Dedicated(2)},
		"elastic, embedded": {jobtest.Embedded, jobtest.Elastic}, "elastic, dedicated": {jobtest.Dedicated(2), jobtest.Elastic},
	} {
		t.Run(name, func(t *testing.T) {
			j, arenas := lending(t, 3, 3, false, options...)
			ordinary := make([]*shm.Arena, 3)
			for round := range 3 {
				for _, of := range []units.ReduceOp{units.Sum, units.Average, units.Max, units.Adasum} {
					sumsIn(j, ordinary, fmt.Sprint(of), n, of, units.Float32)
				}
				sumsIn(j, ordinary, "half", n, units.Average, units.Float16)
				sumsIn(j, ordinary, "small", 1, units.Sum, units.Float64)
				for rank, err := range j.Outcomes(func(rank int) error { // which fails
					_, err := j.Do(rank, jobtest.Float32s(units.Allreduce, "x", int64(n+rank*round)))
					return err
				}) {
					if (round > 0) != errors.Is(err, worker.ErrMismatch) {
						t.Errorf("rank %d: %v", rank, err)
					}
				}
			}
			for rank, w := range j.Workers {
				if sent := w.Engine.Progress().Sent; sent > n {
					t.Errorf("rank %d has sent %d bytes of tensors", rank, sent)
				}
			}
			j.Shutdown()
			for rank, a := range arenas { // that the last "x" is released may have come too late
				if err := a.Renew(); err != nil || a.Alloc(limits.Arena) == nil {
					t.Errorf("the arena of rank %d still holds something, error %v", rank, err)
				}
			}
		})
	}
}

// TestWhatIsStagedTakesCredit: more is staged in turn than the credit, because servers report what they have handled.
func TestWhatIsStagedTakesCredit(t *testing.T) {
	j, _ := lending(t, 2, 2, false, jobtest.Embedded, jobtest.With(func(s *settings.Settings) { s.CreditBytes = 64 << 10 }))
	for range 3 {
		sumsIn(j, make([]*shm.Arena, 2), "x", 1<<20, units.Sum, units.Float32)
	}
	for rank, w := range j.Workers {
		if sent := w.Engine.Progress().Sent; sent > 1<<20 {
			t.Errorf("rank %d has sent %d bytes of tensors", rank, sent)
		}
	}
}

// TestAnEngineThatEndsAbandonsWhatItsServersMayWrite: a rank ends while a sum waits for the other one; memory is free again in the next round. Servers that hear of the
// end first let go of all of it: then the rank ends another time.
func TestAnEngineThatEndsAbandonsWhatItsServersMayWrite(t *testing.T) {
	for range 20 {
		j, arenas := lending(t, 2, 2, false, jobtest.Dedicated(1))
		if _, err := j.Submit(0, jobtest.Float32s(units.Allreduce, "x", 320<<10)); err != nil {
			t.Fatal(err)
		}
		jobtest.Eventually(t, "no partition is staged", func() bool { return arenas[0].Memory()[3] != 0 })
		j.Workers[0].Engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "of a test"})
		j.Shutdown()
		if arenas[0].Alloc(limits.Arena) != nil {
			continue
		}
		if err := arenas[0].Renew(); err != nil {
			t.Fatal(err)
		}
		if arenas[0].Alloc(limits.Arena) == nil {
			t.Error("the renewed arena still holds something")
		}
		return
	}
	t.Error("nothing is abandoned: a server may still write there")
}

// Ranks that begin with different tensors, of more bytes than may be staged, do not wait for each other's room. In an elastic job the answers that are kept take none.
func TestNobodyWaitsForRoomToStage(t *testing.T) {
	const n = 1 << 20 // float32
	const tensors = limits.MaxStaged * 5 / 4 / (4 * n)
	for name, options := range map[string][]jobtest.Option{"static": {jobtest.Dedicated(1)}, "elastic": {jobtest.Dedicated(1), jobtest.Elastic}} {
		t.Run(name, func(t *testing.T) {
			j, _ := lending(t, 2, 2, false, options...)
			for range 2 {
				before := sent(j)
				j.Each(func(rank int) error { return sumAll(j, rank, tensors, n) })
				if travelled := sent(j) - before; travelled > 2*4*n*tensors/2 {
					t.Errorf("%d bytes of tensors have travelled, of %d: there was no room", travelled, 2*4*n*tensors)
				}
			}
		})
	}
}

// sumAll sums so many tensors of n float32 at once, rank 1 in the other order.
func sumAll(j *jobtest.Job, rank, tensors, n int) error {
	results := make([]chan jobtest.Result, tensors)
	for i := range tensors {
		if rank == 1 {
			i = tensors - 1 - i
		}
		submitted, err := j.Submit(rank, jobtest.Float32s(units.Allreduce, fmt.Sprint(i), int64(n)))
		if err != nil {
			return err
		}
		results[i] = submitted[0]
	}
	for i, r := range results {
		if _, err := jobtest.Await(r, rank, fmt.Sprint(i)); err != nil {
			return err
		}
	}
	return nil
}

// sent is how many bytes of tensors have travelled.
func sent(j *jobtest.Job) (bytes uint64) {
	for _, w := range j.Workers {
		bytes += w.Engine.Progress().Sent
	}
	return bytes
}
