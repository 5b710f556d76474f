package jobtest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"sync"

	"github.com/paceline/paceline/internal/half"
	"github.com/paceline/paceline/internal/units"
)

// What reads and writes element by element, here and in other files, is marked norace: the race detector's look at each of these
// accesses took a quarter of the jobs' time. The memory is the test's own; results of operations are copied first, which the
// detector does see.

// Elements writes numbers as a tensor.
//
//go:norace
func Elements(d units.DType, x []float64) []byte {
	b := make([]byte, 0, len(x)*d.Size())
	for _, v := range x {
		b = AppendElement(b, d, v)
	}
	return b
}

// Numbers reads a tensor.
//
//go:norace
func Numbers(d units.DType, b []byte) []float64 {
	b = bytes.Clone(b)
	x := make([]float64, len(b)/d.Size())
	for i := range x {
		x[i] = Element(d, b[i*d.Size():])
	}
	return x
}

// Normal are n numbers that follow from the seed alone.
func Normal(n int, seed ...uint64) []float64 {
	random := rand.New(rand.NewPCG(seed[0], seed[len(seed)-1]))
	x := make([]float64, n)
	for i := range x {
		x[i] = random.NormFloat64()
	}
	return x
}

// normal are float32 numbers, twice the same.
var normal = sync.OnceValue(func() []byte {
	b := Elements(units.Float32, Normal(1<<17, 1))
	return append(b, b...)
})

// NormalFloats is a tensor of n normal float32 numbers that follow from the seed alone. It begins somewhere in the same
// numbers, which costs next to nothing, also under the race detector.
func NormalFloats(n int, seed ...uint64) []byte {
	random := rand.New(rand.NewPCG(seed[0], seed[len(seed)-1]))
	all := normal()
	b := make([]byte, 4*n)
	for left := b; len(left) > 0; {
		left = left[copy(left, all[4*random.IntN(len(all)/8):]):]
	}
	return b
}

// AppendElement writes v in a type; whole numbers wrap around.
//
//go:norace
func AppendElement(b []byte, d units.DType, v float64) []byte {
	e := binary.NativeEndian
	switch d {
	case units.Uint8, units.Int8, units.Bool:
		return append(b, byte(int64(v)))
	case units.Int16:
		return e.AppendUint16(b, uint16(int64(v)))
	case units.Int32:
		return e.AppendUint32(b, uint32(int64(v)))
	case units.Int64:
		return e.AppendUint64(b, uint64(int64(v)))
	case units.Float16:
		return e.AppendUint16(b, half.ToFloat16(float32(v)))
	case units.BFloat16:
		return e.AppendUint16(b, half.ToBFloat16(float32(v)))
	case units.Float32:
		return e.AppendUint32(b, math.Float32bits(float32(v)))
	}
	return e.AppendUint64(b, math.Float64bits(v))
}

// Element reads the first element of a tensor.
//
//go:norace
func Element(d units.DType, b []byte) float64 {
	e := binary.NativeEndian
	switch d {
	case units.Uint8, units.Bool:
		return float64(b[0])
	case units.Int8:
		return float64(int8(b[0]))
	case units.Int16:
		return float64(int16(e.Uint16(b)))
	case units.Int32:
		return float64(int32(e.Uint32(b)))
	case units.Int64:
		return float64(int64(e.Uint64(b)))
	case units.Float16:
		return float64(half.FromFloat16(e.Uint16(b)))
	case units.BFloat16:
		return float64(half.FromBFloat16(e.Uint16(b)))
	case units.Float32:
		return float64(math.Float32frombits(e.Uint32(b)))
	}
	return math.Float64frombits(e.Uint64(b))
}

// hash tells tensors apart.
func hash(b []byte) uint64 {
	sum := sha256.Sum256(bytes.Clone(b))
	return binary.NativeEndian.Uint64(sum[:])
}
