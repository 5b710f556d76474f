package jobtest_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

// TestAlltoallsGoOnWhileServersAreLost at any moment: before a rank puts what it gives, while others get it, when some have it and others not. Others are drained meanwhile.
func TestAlltoallsGoOnWhileServersAreLost(t *testing.T) {
	underLosses(t, "TestAlltoallsGoOnWhileServersAreLost", playAlltoalls)
}

func playAlltoalls(t *testing.T, seed uint64) {
	const steps, names = 25, 3
	random := rand.New(rand.NewPCG(seed, 23))
	ranks, servers := 2+random.IntN(4), 2+random.IntN(3)
	most := 1 + random.IntN(3*jobtest.Partition)
	m := jobtest.NewMeans(random, ranks, most, steps, servers)
	gone := random.Perm(servers)[:random.IntN(servers)]
	j, network := apartOn(t, ranks, jobtest.Dedicated(servers))
	j.Settings.Connections = 1 + random.IntN(2)
	revived(t, network, servers)
	j.Start()
	drained := -1
	if left := random.IntN(servers); len(gone)+2 <= servers && !slices.Contains(gone, left) {
		drained = left
	}
	if err := network.Script(serverLosses(random, m, gone)); err != nil {
		t.Fatal(err)
	}
	for rank, err := range j.Outcomes(func(rank int) error {
		if rank == 0 && drained >= 0 {
			j.StopServer(drained)
		}
		for step := range steps {
			if err := swap(j, rank, step, names, most, seed); err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
		return nil
	}) {
		if err != nil {
			t.Errorf("rank %d of %d, without servers %v and %d of %d: %v", rank, ranks, gone, drained, servers, err)
		}
	}
}

// swap has a rank do alltoalls at the same time, of as many bytes for each rank as all know.
func swap(j *jobtest.Job, rank, step, names, most int, seed uint64) error {
	ranks := len(j.Workers)
	var ops []worker.Op
	for name := range names {
		op := worker.Op{Kind: units.Alltoall, DType: units.Uint8, Name: fmt.Sprint("a", name)}
		for to := range ranks {
			part := swapped(step, name, rank, to, most, seed)
			op.Input, op.Splits = append(op.Input, part...), append(op.Splits, int64(len(part)))
		}
		op.Shape = []int64{int64(len(op.Input))}
		ops = append(ops, op)
	}
	results, err := j.Submit(rank, ops...)
	if err != nil {
		return err
	}
	for name, done := range results {
		out, err := jobtest.Await(done, rank, ops[name].Name)
		if err != nil {
			return err
		}
		var want []byte
		for from := range ranks {
			want = append(want, swapped(step, name, from, rank, most, seed)...)
		}
		if !bytes.Equal(out.Data, want) {
			return fmt.Errorf("%s gives %d bytes that are not the %d that were brought", ops[name].Name, len(out.Data), len(want))
		}
	}
	return nil
}

// swapped is what one rank gives another.
func swapped(step, name, from, to, most int, seed uint64) []byte {
	random := rand.New(rand.NewPCG(seed, uint64(((step*16+name)*16+from)*16+to)))
	return pattern(max(random.IntN(2*most)-most/2, 0), random.Uint64())
}
