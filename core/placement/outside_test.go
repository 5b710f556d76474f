package placement_test

import (
	"slices"
	"testing"

	"github.com/paceline/paceline/core/placement"
)

func init() { placement.Register("from-outside", fromOutside) }

// fromOutside places as largest-first does. The tests of all policies hold it against the same promises.
func fromOutside(string) (func(weights []float64) placement.Placer, error) {
	policy, err := placement.Parse("largest-first")
	return func(weights []float64) placement.Placer {
		placer, err := policy.Over(weights)
		if err != nil {
			panic(err) // Over has checked the weights
		}
		return placer
	}, err
}

func TestAPolicyFromOutsidePlacesBySetting(t *testing.T) {
	policy, err := placement.Parse("from-outside:anything")
	if err != nil {
		t.Fatal(err)
	}
	placer, err := policy.Over(placement.Even(2))
	if err != nil {
		t.Fatal(err)
	}
	if got := placer.Place([]placement.Load{{Parts: []uint32{8, 8}, Home: 1}}); !slices.Equal(got[0], []int{1, 0}) {
		t.Errorf("partitions on %v", got)
	}
}
