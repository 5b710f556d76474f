package placement_test

import (
	"slices"
	"testing"

	"github.com/paceline/paceline/core/placement"
)

func init() { placement.Register("from-outside:SERVER", fromOutside) }

// fromOutside puts everything that has no home on one server. The tests of all policies hold it against the same promises.
func fromOutside(a *placement.Arguments) placement.Strategy {
	server := 0
	if a.More() {
		server = int(a.Whole("SERVER", 0, 9))
	}
	return placement.Strategy{
		Over:  func(weights []float64) placement.Placer { return constant(server) },
		Width: func(uint64, int) int { return 1 },
	}
}

type constant int

func (c constant) Place(tensors []placement.Load) [][]int {
	placed := make([][]int, len(tensors))
	for i, t := range tensors {
		server := int(c)
		if t.Home != placement.Free {
			server = t.Home
		}
		placed[i] = slices.Repeat([]int{server}, len(t.Parts))
	}
	return placed
}

func (constant) Add([]uint32, []int)    {}
func (constant) Remove([]uint32, []int) {}

func TestAPolicyFromOutsidePlacesBySetting(t *testing.T) {
	policy, err := placement.Parse("from-outside:1")
	if err != nil {
		t.Fatal(err)
	}
	placer, err := policy.Over(placement.Even(2))
	if err != nil {
		t.Fatal(err)
	}
	if got := placer.Place([]placement.Load{{Parts: []uint32{8, 8}, Home: placement.Free}}); !slices.Equal(got[0], []int{1, 1}) {
		t.Errorf("partitions on %v", got)
	}
}
