package barrier_test

import (
	"math/rand/v2"
	"testing"

	"github.com/paceline/paceline/core/barrier"
	"github.com/paceline/paceline/core/barrier/reference"
)

func TestSearchAllocatesNothingTheSecondTime(t *testing.T) {
	ends := reference.Ends(rand.New(rand.NewPCG(1, 1)), 50, 15, reference.WarmUp)
	var s barrier.Search
	if n := testing.AllocsPerRun(10, func() { s.ZipLine(ends) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The paper's largest: its fastest exact search takes 566 ms.
func BenchmarkZipLine1000Workers150Predictions(b *testing.B) {
	ends := reference.Ends(rand.New(rand.NewPCG(1, 1)), 1000, 150, reference.WarmUp)
	var s barrier.Search
	b.ReportAllocs()
	for b.Loop() {
		s.ZipLine(ends)
	}
}
