package jobtest_test

import (
	"errors"
	"math"
	"testing"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/jobtest"
)

// float24 is a codec that this package adds to those of core/codec, by this file alone: the three upper bytes of each
// float32.
type float24 struct{}

func init() {
	codec.Register("float24", func(*codec.Arguments) codec.Codec { return float24{} })
}

func (float24) String() string            { return "float24" }
func (float24) MaxEncoded(n int) int      { return 3 * n }
func (float24) ResidualBytes(int) int     { return 0 }
func (float24) Unbiased() bool            { return false }
func (float24) Precise() bool             { return false }
func (c float24) Answer() codec.Codec     { return c }
func (c float24) Difference() codec.Codec { return c }

func (float24) Encode(dst, src, _ []byte, _ codec.Stream) int {
	for i := range len(src) / 4 {
		copy(dst[3*i:3*i+3], src[4*i+1:4*i+4])
	}
	return len(src) / 4 * 3
}

func (c float24) Decode(dst, message []byte) error {
	clear(dst)
	return c.DecodeAdd(dst, message)
}

func (float24) DecodeAdd(acc, message []byte) error {
	if 4*len(message) != 3*len(acc) {
		return errors.New("a message of another length")
	}
	x := jobtest.Numbers(units.Float32, acc)
	var one [4]byte
	for i := range x {
		copy(one[1:], message[3*i:3*i+3])
		x[i] += jobtest.Numbers(units.Float32, one[:])[0]
	}
	copy(acc, jobtest.Elements(units.Float32, x))
	return nil
}

// A codec is one file and one registration: neither the engine nor the server knows it by name.
func TestACodecFromOutsideTrains(t *testing.T) {
	const ranks, features, rows, steps = 3, 2000, 20, 60
	for place, option := range map[string]jobtest.Option{"embedded": jobtest.Embedded, "dedicated": jobtest.Dedicated(2)} {
		t.Run(place, func(t *testing.T) {
			j := jobtest.Start(t, ranks, jobtest.SmallPartitions, option)
			truth, w := jobtest.Normal(features, 1), make([]float64, features)
			data := make([][]float64, ranks*rows)
			for i := range data {
				data[i] = jobtest.Normal(features, 2, uint64(i))
			}
			before := distance(w, truth)
			for step := range steps {
				gradient := averages(j, "w", jobtest.CodedBy("float24"), units.Float32, func(rank int) []float64 {
					return leastSquares(w, truth, data[rank*rows+step%rows])
				})
				for i := range w {
					w[i] -= gradient[i] / features
				}
			}
			if after := distance(w, truth); after > 0.995*before {
				t.Errorf("the distance to the solution was %g and is %g after %d steps", before, after, steps)
			}
		})
	}
}

// leastSquares is the gradient of half the squared error at one row.
func leastSquares(w, truth, row []float64) []float64 {
	var off float64
	for i := range row {
		off += row[i] * (w[i] - truth[i])
	}
	g := make([]float64, len(row))
	for i := range g {
		g[i] = off * row[i]
	}
	return g
}

func distance(a, b []float64) float64 {
	var sum float64
	for i := range a {
		sum += (a[i] - b[i]) * (a[i] - b[i])
	}
	return math.Sqrt(sum)
}
