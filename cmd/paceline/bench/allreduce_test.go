package bench

import (
	"fmt"
	"strings"
	"testing"

	"github.com/paceline/paceline/internal/units"
)

func TestEveryElementTypeHoldsTheSumsExactly(t *testing.T) {
	for _, d := range DTypes() {
		v := newValues(d, 0, 85)
		for i := range period {
			sum := 0
			for r := range 85 {
				sum += valueOf(i, r)
			}
			want := encode(units.Float64, []int{sum})
			if got := widen(d, v.sum[i*d.Size():(i+1)*d.Size()]); got != string(want) {
				t.Fatalf("%v: sum %d of element %d is stored as %x", d, sum, i, got)
			}
		}
	}
}

// widen reads one element by comparing it with all numbers that it may be.
func widen(d units.DType, b []byte) string {
	for n := range 256 {
		if string(encode(d, []int{n})) == string(b) {
			return string(encode(units.Float64, []int{n}))
		}
	}
	return "not a small number"
}

func TestAWrongElementIsFoundWhereverItIs(t *testing.T) {
	v := newValues(units.Float32, 0, 2)
	result := make([]byte, 4*(3*period+5))
	right := values{mine: v.sum}
	right.fill(result)
	if err := v.check(result); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{0, period - 1, period, 3*period + 4} {
		result[4*at] ^= 1
		err := v.check(result)
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("element %d of", at)) {
			t.Errorf("element %d: %v", at, err)
		}
		result[4*at] ^= 1
	}
}

func TestPartitionsInEachOthersPlacesAreFound(t *testing.T) {
	v := newValues(units.Float32, 0, 2)
	right := values{mine: v.sum}
	result := make([]byte, 4<<20)
	right.fill(result)
	half := append([]byte(nil), result[:2<<20]...)
	copy(result, result[2<<20:])
	copy(result[2<<20:], half)
	if v.check(result) == nil {
		t.Error("two partitions of 2 MiB were exchanged and nothing is wrong")
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
