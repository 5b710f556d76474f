package bench

import (
	"math"
	"testing"

	"github.com/paceline/paceline/core/placement"
	"github.com/paceline/paceline/sim/shapes"
)

// With one server all placements are alike, and none is faster than its bound.
func TestPlacementsAreBoundedByTheLinks(t *testing.T) {
	for servers := 1; servers <= 8; servers += 7 {
		p := PlacementPlan{Shapes: shapes.All()[1:3], Placements: placement.Names(), Workers: 4, Servers: servers, PartitionBytes: 4 << 20, Bandwidth: 1e9}
		r, err := ComparePlacements(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range r.Rows {
			if row.Exchange < row.Bound || servers == 1 && math.Abs(row.Uneven-1) > 1e-12 {
				t.Errorf("%d servers: %+v", servers, row)
			}
			if row.Placement == "largest-first" && row.Uneven > 1.05 {
				t.Errorf("%d servers: %s is placed at %.3f of the mean", servers, row.Model, row.Uneven)
			}
		}
	}
}
