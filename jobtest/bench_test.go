package jobtest_test

import (
	"fmt"
	"sync"
	"testing"

	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
	"github.com/paceline/paceline/worker"
)

// BenchmarkAllreduce exchanges over loopback within one process: for profiles only.
func BenchmarkAllreduce(b *testing.B) {
	for _, n := range []int{2, 4} {
		for _, size := range []int{4 << 10, 1 << 20, 64 << 20} {
			b.Run(fmt.Sprintf("%d ranks/%d bytes", n, size), func(b *testing.B) {
				j := jobtest.Start(b, n)
				b.SetBytes(int64(size))
				var wg sync.WaitGroup
				b.ResetTimer()
				for rank := range n {
					wg.Go(func() {
						buf := make([]byte, size)
						op := worker.Op{Kind: units.Allreduce, DType: units.Float32, ReduceOp: units.Sum, Shape: []int64{int64(size / 4)}, Input: buf, Output: buf, Name: "x"}
						for range b.N {
							if _, err := j.Do(rank, op); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				wg.Wait()
				b.StopTimer()
			})
		}
	}
}
