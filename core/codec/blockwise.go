package codec

import (
	"fmt"
	"math/bits"
	"slices"
)

// grid is the set of values that the elements of a block are rounded to. The kernels use its numbers.
type grid struct {
	kind   kind
	norm   norm
	levels int     // codes go from 0 to 2·levels; 1 for kindSign, of which they are 0 and 1
	bits   int     // of a code
	block  int     // elements
	elias  bool    // codes are written as Elias' gamma code where that is shorter
	clip   float64 // normClipped: standard deviations from 0
}

// kind is the rounding of an element to a code.
type kind int

const (
	kindFloat16  kind = iota // no scale, no codes: 16-bit floats
	kindBFloat16             //
	kindUniform              // multiples of scale/levels, stochastically
	kindNatural              // scale halved up to levels-1 times, and 0, stochastically
	kindSign                 // ±scale
)

// norm is the definition of a block's scale.
type norm int

const (
	normMax     norm = iota // greatest magnitude
	normL2                  // Euclidean norm
	normMean                // mean magnitude
	normClipped             // greatest magnitude, at most clip standard deviations from 0
)

// Bounds of the parameters.
const (
	minBlock   = 8
	maxBlock   = 8192 // the kernels' CODEC_MAX_BLOCK
	halfBlock  = 1024 // elements of 16-bit floats per pass, to stay in cache
	maxLevels  = 32767
	maxNatural = 127 // levels: beyond, halves leave the range of float32
)

// tiny is the least scale. A block whose scale is below is sent as zeros: its reciprocal would overflow.
const tiny = 0x1p-100

// blockwise rounds every element to a grid whose scale its block sets.
type blockwise struct {
	grid
	name  string
	parts []string // of the setting, specific to the codec
	feedback
	otherwise bool // the default for feedback
	unbiased  bool
	setting   string
}

// newBlockwise completes the grid and writes the setting. parts are the codec's own arguments.
func newBlockwise(name string, g grid, residual, otherwise, unbiased bool, parts ...string) Codec {
	if g.kind == kindSign {
		g.bits = 1
	} else {
		g.bits = bits.Len(uint(2 * g.levels))
	}
	whole := Setting(name, append(slices.Clone(parts), FeedbackPart(residual, otherwise))...)
	return &blockwise{g, name, parts, feedback(residual), otherwise, unbiased, whole}
}

func (c *blockwise) Answer() Codec { return c }

// Difference is the codec without a residual. Where rounding to a multiple of the norm or of a few levels is
// unbiased but noisy, the noise may exceed the difference: int8 or int4 of the same blocks replace it.
func (c *blockwise) Difference() Codec {
	noisy := c.kind == kindUniform && (c.norm != normMax || c.levels < int4Levels) || c.kind == kindNatural && c.levels == 1
	switch {
	case !noisy:
		return newBlockwise(c.name, c.grid, false, c.otherwise, c.unbiased, c.parts...)
	case c.levels >= 10:
		return newInteger("int8", int8Levels, c.block, false)
	}
	return newInteger("int4", int4Levels, c.block, false)
}

func (c *blockwise) Precise() bool { return c.kind <= kindBFloat16 }

func (a *Arguments) block(otherwise int) (int, string) {
	n := a.Integer("block", otherwise, minBlock, maxBlock)
	return n, blockPart(n)
}

func blockPart(n int) string { return fmt.Sprintf("block=%d", n) }

func (a *Arguments) levels(otherwise, most int) (int, string) {
	n := a.Integer("levels", otherwise, 1, most)
	return n, fmt.Sprintf("levels=%d", n)
}

func (c *blockwise) String() string { return c.setting }

func (c *blockwise) Unbiased() bool { return c.unbiased }

func (c *blockwise) MaxEncoded(n int) int {
	if c.kind <= kindBFloat16 {
		return 2 * n
	}
	whole, rest := n/c.block, n%c.block
	size := whole * (c.head() + c.packedBytes(c.block))
	if rest > 0 {
		size += c.head() + c.packedBytes(rest)
	}
	return size
}

// head is the bytes before the codes of a block.
func (g *grid) head() int {
	if g.elias {
		return 6
	}
	return 4
}

func (g *grid) packedBytes(m int) int {
	if g.bits == 8 {
		return m
	}
	return (m + 7) / 8 * g.bits
}

func (c *blockwise) Encode(dst, src, residual []byte, s Stream) int {
	if checkEncode(c, dst, src, residual) == 0 {
		return 0
	}
	return best.encode(&c.grid, dst, src, residual, s.keys())
}

func (c *blockwise) Decode(dst, message []byte) error { return c.decode(dst, message, false) }

func (c *blockwise) DecodeAdd(acc, message []byte) error { return c.decode(acc, message, true) }

func (c *blockwise) decode(dst, message []byte, add bool) error {
	n := elements(dst)
	switch best.decode(&c.grid, dst, message, add) {
	case badLength:
		return malformed(c, n, "it has %d bytes, at most %d are possible", len(message), c.MaxEncoded(n))
	case badCode:
		return malformed(c, n, "it holds a code beyond the %d levels", c.grid.levels)
	}
	return nil
}
