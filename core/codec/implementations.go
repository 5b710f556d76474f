package codec

import "unsafe"

// implementation is one implementation of the passes over whole tensors. Callers have checked the lengths.
type implementation interface {
	// encode is Codec.Encode of a blockwise codec.
	encode(g *grid, dst, src, residual []byte, k keys) int

	// decode is Codec.Decode and Codec.DecodeAdd of one.
	decode(g *grid, dst, message []byte, add bool) fault

	// scan adds src to x where there is a src, and appends to the candidates the elements, from index
	// from on, whose magnitude's bits exceed the threshold. It stops at the end, or where the candidates may
	// lack room for the next 64 elements, and returns that index.
	scan(x, src []byte, from int, threshold uint32, c *candidates) int

	// feed adds src to x where there is a src, and returns the bits of the greatest magnitude.
	feed(x, src []byte) uint32

	// momentum makes u = m·u + src, then v = v + u.
	momentum(v, u, src []byte, m float32)

	String() string
}

// fault is the reason why a message cannot be decoded.
type fault int

const (
	sound fault = iota
	badLength
	badCode
)

// best is the fastest implementation of this machine.
var best = func() implementation { e := implementations(); return e[len(e)-1] }()

// magnitude and infinite are a float32's bits but for the sign, and those of infinity; NaN has more.
const (
	magnitude = 0x7fffffff
	infinite  = 0x7f800000
)

// of views bytes as elements. Every supported platform permits unaligned numbers.
func of[T any](b []byte) []T {
	if len(b) == 0 {
		return nil
	}
	var t T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(t)))
}

// raw views float32 as bytes.
func raw(f []float32) []byte {
	if len(f) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(f))), 4*len(f))
}
