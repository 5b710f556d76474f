package bench

import (
	"math"
	"testing"

	"github.com/paceline/paceline/core/placement"
)

// Published numbers of parameters, and of tensors in the implementations that have the same layers.
func TestShapesHaveThePublishedParameters(t *testing.T) {
	want := map[string][2]int{
		"resnet50": {25_557_032, 161}, "resnet56": {853_018, 167}, "resnet152": {60_192_808, 467}, "googlenet": {6_998_552, 116},
		"inception-v4": {42_679_816, 449}, "vgg16": {138_357_544, 32}, "bert-base": {109_482_240, 199},
	}
	for _, s := range Shapes() {
		if got := [2]int{s.Parameters(), len(s.Elements)}; got != want[s.Name] {
			t.Errorf("%s has %d parameters in %d tensors, published are %v", s.Name, got[0], got[1], want[s.Name])
		}
	}
}

// With one server all placements are alike, and none is faster than its bound.
func TestPlacementsAreBoundedByTheLinks(t *testing.T) {
	for servers := 1; servers <= 8; servers += 7 {
		p := PlacementPlan{Shapes: Shapes()[:2], Placements: placement.Names(), Workers: 4, Servers: servers, PartitionBytes: 4 << 20, Bandwidth: 1e9}
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
