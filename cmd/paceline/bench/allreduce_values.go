package bench

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/units"
)

const (
	// period is the number of elements after which the values repeat. It is a prime, so that swapped partitions and
	// chunks are detected.
	period = 4093
	// modulus is a prime above limits.MaxRanks: no number of ranks has the same sum everywhere.
	modulus = 16411
)

// values are a rank's input and the expected result, a period of each.
type values struct{ mine, sum []byte }

// DTypes are the element types that can be measured.
func DTypes() []units.DType {
	return []units.DType{units.Float32, units.Float64, units.Float16, units.BFloat16, units.Int32, units.Int64}
}

func newValues(d units.DType, rank, ranks int) values {
	mine, sum := make([]int, period), make([]int, period)
	for i := range sum {
		mine[i], sum[i] = valueOf(i, rank), sumOf(i, ranks)
	}
	return values{encode(d, mine), encode(d, sum)}
}

// valueOf is the step from a rank's residue to the next one's, so that the sum over the ranks is one step as well: from
// -3 to 3 for any number of ranks, which every element type holds.
func valueOf(i, rank int) int { return residue(i, rank+1) - residue(i, rank) }

func sumOf(i, ranks int) int { return residue(i, ranks) - residue(i, 0) }

func residue(i, rank int) int {
	at := i + period*rank
	return at * at % modulus % 4
}

func encode(d units.DType, v []int) []byte {
	b := make([]byte, 0, len(v)*8)
	for _, n := range v {
		switch d {
		case units.Int32:
			b = binary.NativeEndian.AppendUint32(b, uint32(n))
		case units.Int64:
			b = binary.NativeEndian.AppendUint64(b, uint64(n))
		case units.Float64:
			b = binary.NativeEndian.AppendUint64(b, math.Float64bits(float64(n)))
		default:
			b = binary.NativeEndian.AppendUint32(b, math.Float32bits(float32(n)))
		}
	}
	if reduce.AccType(d) != d {
		narrow := make([]byte, len(v)*d.Size())
		reduce.Store(d, narrow, b, 1, 1)
		return narrow
	}
	return b
}

// fill sets a tensor to this rank's input. Each tensor of an exchange has a number, and starts there in the period.
func (v *values) fill(tensor []byte, number int) {
	for from := v.start(number); len(tensor) > 0; from = 0 {
		tensor = tensor[copy(tensor, v.mine[from:]):]
	}
}

// check finds the first wrong element of the result of the tensor with this number.
func (v *values) check(result []byte, number int) error {
	from := v.start(number)
	for at := 0; at < len(result); at, from = at+len(v.sum)-from, 0 {
		got := result[at:min(at+len(v.sum)-from, len(result))]
		want := v.sum[from : from+len(got)]
		if bytes.Equal(got, want) {
			continue
		}
		size := len(v.sum) / period
		for i := 0; ; i += size {
			if g, w := got[i:i+size], want[i:i+size]; !bytes.Equal(g, w) {
				return fmt.Errorf("element %d of %d is wrong: its bytes are %x, want %x", (at+i)/size, len(result)/size, g, w)
			}
		}
	}
	return nil
}

func (v *values) start(number int) int { return number % period * (len(v.sum) / period) }
