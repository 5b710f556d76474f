package bench

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/units"
)

func TestEveryElementTypeHoldsTheSumsExactly(t *testing.T) {
	for _, d := range DTypes() {
		v := newValues(d, 0, 85)
		for i := range period {
			want := encode(units.Float64, []int{sumOf(i, 85)})
			if got := widen(d, v.sum[i*d.Size():(i+1)*d.Size()]); got != string(want) {
				t.Fatalf("%v: sum %d of element %d is stored as %x", d, sumOf(i, 85), i, got)
			}
		}
	}
}

// widen reads one element by comparing it with all numbers that it may be.
func widen(d units.DType, b []byte) string {
	for n := -3; n <= 3; n++ {
		if string(encode(d, []int{n})) == string(b) {
			return string(encode(units.Float64, []int{n}))
		}
	}
	return "not a small number"
}

func TestTheSumIsThatOfTheValuesForAnyNumberOfRanks(t *testing.T) {
	for _, i := range []int{0, 1, 2, period / 2, period - 1} {
		sum := 0
		for r := range limits.MaxRanks {
			sum += valueOf(i, r)
			if sum != sumOf(i, r+1) {
				t.Fatalf("element %d of %d ranks: %d, want %d", i, r+1, sumOf(i, r+1), sum)
			}
		}
	}
}

func TestAWrongElementIsFoundWhereverItIs(t *testing.T) {
	v := newValues(units.Float32, 0, 2)
	result := make([]byte, 4*(3*period+5))
	right := values{mine: v.sum, sum: v.sum}
	for number := range 3 {
		right.fill(result, number)
		if err := v.check(result, number); err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{0, period - 1, period, 3*period + 4} {
			result[4*at] ^= 1
			err := v.check(result, number)
			if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("element %d of", at)) {
				t.Errorf("tensor %d, element %d: %v", number, at, err)
			}
			result[4*at] ^= 1
		}
	}
}

func TestPartitionsInEachOthersPlacesAreFound(t *testing.T) {
	result := make([]byte, 4<<20)
	for _, ranks := range []int{1, 2, 3, 4, 8, 64, 256, 1000, 10000, limits.MaxRanks} {
		v := newValues(units.Float32, 0, ranks)
		right := values{mine: v.sum, sum: v.sum}
		right.fill(result, 0)
		for length := 1 << 10; length < len(result); length *= 2 {
			exchange(result, length)
			if v.check(result, 0) == nil {
				t.Errorf("%d ranks: two partitions of %d bytes were exchanged and nothing is wrong", ranks, length)
			}
			exchange(result, length)
		}
	}
}

// exchange puts the first two parts of this length in each other's places.
func exchange(tensor []byte, length int) {
	first := slices.Clone(tensor[:length])
	copy(tensor, tensor[length:2*length])
	copy(tensor[length:], first)
}

func TestTensorsInEachOthersPlacesAreFound(t *testing.T) {
	v := newValues(units.Float32, 0, 4)
	right := values{mine: v.sum, sum: v.sum}
	result := make([]byte, 4<<10)
	right.fill(result, 0)
	if v.check(result, 1) == nil {
		t.Error("a tensor has the result of another and nothing is wrong")
	}
}

func TestARowTellsMedianAndSpreadOfOneExchange(t *testing.T) {
	r := newRow(2<<20, []float64{0.006, 0.002, 0.004, 0.010, 0.008}) // two exchanges in each
	if r.InARow != 2 || r.Median != 3 || r.P10 != 1.4 || r.P90 != 4.6 {
		t.Errorf("%+v, want 2 in a row, median 3 ms, 1.4 to 4.6", r)
	}
	if want := float64(2<<20) / 3 / 1e6; r.GBps != want {
		t.Errorf("%v GB/s, want %v", r.GBps, want)
	}
}
