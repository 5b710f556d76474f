package agreement

import (
	"testing"

	"github.com/paceline/paceline/internal/invariant"
	"github.com/paceline/paceline/internal/rankset"
)

// TestArrivalsDoNotAllocate: every rank's every operation passes here.
func TestArrivalsDoNotAllocate(t *testing.T) {
	if invariant.On {
		t.Skip("checks allocate")
	}
	h := NewHome(Config{All: rankset.Range(4)})
	x := &Tensor{ID: ID{Name: "x"}, Ranks: rankset.Range(4)}
	count := uint64(0)
	if n := testing.AllocsPerRun(1000, func() {
		for rank := range 4 {
			h.Arrive(x, rank, count, 0)
		}
		count++
	}); n != 0 {
		t.Fatalf("%v allocations for an operation", n)
	}
}
