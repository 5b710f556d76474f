package bench

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"github.com/paceline/paceline/core/reduce"
	"github.com/paceline/paceline/internal/units"
)

// period is the number of elements after which the values repeat. It is a prime, so that swapped partitions and
// chunks are detected.
const period = 4093

// values are a rank's input and the expected result, a period of each. They are small integers,
// whose sums every element type holds exactly (bfloat16 up to 85 ranks).
type values struct{ mine, sum []byte }

// DTypes are the element types that can be measured.
func DTypes() []units.DType {
	return []units.DType{units.Float32, units.Float64, units.Float16, units.BFloat16, units.Int32, units.Int64}
}

func newValues(d units.DType, rank, ranks int) values {
	mine, sum := make([]int, period), make([]int, period)
	for i := range sum {
		mine[i] = valueOf(i, rank)
		for r := range ranks {
			sum[i] += valueOf(i, r)
		}
	}
	return values{encode(d, mine), encode(d, sum)}
}

func valueOf(i, rank int) int { return (i*7 + i/13 + rank*3) % 4 }

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

// fill sets the tensor to this rank's input.
func (v *values) fill(tensor []byte) {
	for len(tensor) > 0 {
		tensor = tensor[copy(tensor, v.mine):]
	}
}

// check finds the first wrong element of a result.
func (v *values) check(result []byte) error {
	for at := 0; at < len(result); at += len(v.sum) {
		got := result[at:min(at+len(v.sum), len(result))]
		want := v.sum[:len(got)]
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
