package codec

import (
	"encoding/binary"
	"math"

	"github.com/paceline/paceline/internal/half"
)

// reference defines the result of every kernel in plain Go, and runs where there is no C compiler. Products
// in sums are converted to their own type explicitly, which forbids the compiler to fuse them.
type reference struct{}

func (reference) String() string { return "reference" }

func (reference) encode(g *grid, dst, src, residual []byte, k keys) int {
	x, r := of[float32](src), of[float32](residual)
	var codes [maxBlock]uint16
	var sent [maxBlock]float32
	at := 0
	for i := 0; i < len(x); i += g.block {
		from := x[i:min(i+g.block, len(x))]
		if r != nil {
			for j, v := range from {
				r[i+j] += v
			}
			from = r[i : i+len(from)]
		}
		c, values := codes[:len(from)], sent[:len(from)]
		if g.kind <= kindBFloat16 {
			at += g.narrow(dst[at:], from)
			g.widen(values, dst[at-2*len(from):])
		} else {
			step := g.quantise(c, from, k, uint32(i))
			at += g.writeBlock(dst[at:], c, step)
			g.values(values, c, step)
		}
		if r != nil {
			leave(from, values)
		}
	}
	return at
}

// leave subtracts what was sent from the residual. Where that is not finite the residual becomes 0.
func leave(r, sent []float32) {
	for i, v := range sent {
		if r[i] -= v; math.Float32bits(r[i])&magnitude >= infinite {
			r[i] = 0
		}
	}
}

func (reference) decode(g *grid, dst, message []byte, add bool) fault {
	d := of[float32](dst)
	if f := g.check(message, len(d)); f != sound {
		return f
	}
	var codes [maxBlock]uint16
	var values [maxBlock]float32
	for i := 0; i < len(d); i += g.block {
		to := d[i:min(i+g.block, len(d))]
		v, c := values[:len(to)], codes[:len(to)]
		if g.kind <= kindBFloat16 {
			g.widen(v, message)
			message = message[2*len(to):]
		} else {
			took, step, _ := g.readBlock(c, message)
			g.values(v, c, step)
			message = message[took:]
		}
		for j, f := range v {
			if add {
				f += to[j]
			}
			to[j] = f
		}
	}
	return sound
}

// check reads a message of n elements without decoding it.
func (g *grid) check(message []byte, n int) fault {
	if g.kind <= kindBFloat16 {
		if len(message) != 2*n {
			return badLength
		}
		return sound
	}
	var codes [maxBlock]uint16
	for ; n > 0; n -= g.block {
		took, _, f := g.readBlock(codes[:min(g.block, n)], message)
		if f != sound {
			return f
		}
		message = message[took:]
	}
	if len(message) > 0 {
		return badLength
	}
	return sound
}

func (reference) scan(x, src []byte, from int, threshold uint32, c *candidates) int {
	v, g := of[float32](x), of[float32](src)
	for from < len(v) {
		group := min(64, len(v)-from)
		if len(c.index)-c.n < group {
			break
		}
		for i := from; i < from+group; i++ {
			if src != nil {
				v[i] += g[i]
			}
			if u := math.Float32bits(v[i]) & magnitude; u > threshold {
				c.index[c.n], c.key[c.n] = uint32(i), u
				c.n++
			}
		}
		from += group
	}
	return from
}

func (reference) feed(x, src []byte) (most uint32) {
	v, g := of[float32](x), of[float32](src)
	for i := range v {
		if src != nil {
			v[i] += g[i]
		}
		most = max(most, math.Float32bits(v[i])&magnitude)
	}
	return most
}

func (reference) momentum(v, u, src []byte, m float32) {
	sum, moving := of[float32](v), of[float32](u)
	for i, x := range of[float32](src) {
		moving[i] = float32(m*moving[i]) + x
		sum[i] += moving[i]
	}
}

func (g *grid) narrow(dst []byte, x []float32) int {
	for i, f := range x {
		h := half.ToFloat16
		if g.kind == kindBFloat16 {
			h = half.ToBFloat16
		}
		binary.LittleEndian.PutUint16(dst[2*i:], h(f))
	}
	return 2 * len(x)
}

func (g *grid) widen(d []float32, message []byte) {
	for i := range d {
		h := binary.LittleEndian.Uint16(message[2*i:])
		if g.kind == kindBFloat16 {
			d[i] = half.FromBFloat16(h)
		} else {
			d[i] = half.FromFloat16(h)
		}
	}
}

// scale is a block's scale, NaN where an element is not finite.
func (g *grid) scale(x []float32) float64 {
	most := uint32(0)
	var sums [8][2]float64 // one per index modulo 8: of |x| and x²
	for i, f := range x {
		most = max(most, math.Float32bits(f)&magnitude)
		v := float64(f)
		s := &sums[i%8]
		s[0] += math.Abs(v)
		s[1] += float64(v * v)
	}
	if most >= infinite {
		return math.NaN()
	}
	var m [2]float64
	for _, s := range sums {
		for k := range m {
			m[k] += s[k]
		}
	}
	peak, n := float64(math.Float32frombits(most)), float64(len(x))
	switch g.norm {
	case normL2:
		return min(math.Sqrt(m[1]), math.MaxFloat32)
	case normMean:
		return m[0] / n
	case normClipped:
		return min(g.clip*math.Sqrt(m[1]/n), peak)
	}
	return peak
}

// power rounds up to a power of two; NaN where float32 has none.
func power(scale float64) float32 {
	u := (math.Float32bits(float32(scale)) + 0x7fffff) &^ 0x7fffff
	if u >= infinite {
		return float32(math.NaN())
	}
	return math.Float32frombits(u)
}

// quantise makes the codes of a block and returns the number that precedes them in the message.
func (g *grid) quantise(codes []uint16, x []float32, k keys, base uint32) float32 {
	scale := g.scale(x)
	step := float32(scale)
	switch g.kind {
	case kindUniform:
		step = float32(scale / float64(g.levels))
		if most := step * float32(g.levels); math.Float32bits(most) == infinite { // it was rounded up
			step = math.Float32frombits(math.Float32bits(step) - 1)
		}
	case kindNatural:
		step = power(scale)
	}
	if math.Float32bits(step)&magnitude >= infinite {
		step = math.Float32frombits(0x7fc00000)
	}
	if step != step || g.kind != kindSign && scale < tiny {
		for i := range codes {
			codes[i] = uint16(g.levels)
		}
		if step == step {
			step = 0
		}
		return step
	}
	inverse := float32(1 / float64(step))
	for i, f := range x {
		switch g.kind {
		case kindSign:
			codes[i] = uint16(^math.Float32bits(f) >> 31)
		case kindUniform:
			codes[i] = g.uniform(float32(f*inverse), k.draw(base+uint32(i)))
		case kindNatural:
			codes[i] = g.natural(float32(f*inverse), k.draw(base+uint32(i)))
		}
	}
	return step
}

// unit makes a number in [0, 1) of the upper 24 random bits.
func unit(h uint32) float32 { return float32(h>>8) * 0x1p-24 }

// uniform rounds y, clipped to ±levels, to one of the two integers around it, with the probability that
// makes it unbiased; codes count from -levels.
func (g *grid) uniform(y float32, h uint32) uint16 {
	y = max(min(y, float32(g.levels)), -float32(g.levels))
	below := int(math.Floor(float64(y)))
	code := below + g.levels
	if unit(h) < y-float32(below) {
		code++
	}
	return uint16(code)
}

// natural rounds y, within ±1, to one of the two powers of two around it: adding random bits below the
// exponent carries into it with the right probability. Below the smallest power, y becomes that or 0.
func (g *grid) natural(y float32, h uint32) uint16 {
	u := math.Float32bits(y) & magnitude
	level := 0
	if u >= uint32(128-g.levels)<<23 { // 2^(1-levels)
		level = int((u+h>>9)>>23) - 127 + g.levels
	} else if unit(h) < math.Float32frombits(u)*math.Float32frombits(uint32(126+g.levels)<<23) {
		level = 1
	}
	if y < 0 {
		level = -level
	}
	return uint16(g.levels + level)
}

func (g *grid) values(d []float32, codes []uint16, step float32) {
	for i, c := range codes {
		level := int(c) - g.levels
		switch {
		case g.kind == kindSign && c != 0:
			d[i] = step
		case g.kind == kindSign:
			d[i] = -step
		case g.kind == kindUniform:
			d[i] = float32(level) * step
		case level == 0:
			d[i] = 0 * step
		default:
			sign, power := uint32(0), level
			if level < 0 {
				sign, power = 1<<31, -level
			}
			d[i] = math.Float32frombits(sign|uint32(127-g.levels+power)<<23) * step
		}
	}
}

func (g *grid) writeBlock(out []byte, codes []uint16, step float32) int {
	packed := g.packedBytes(len(codes))
	binary.LittleEndian.PutUint32(out, math.Float32bits(step))
	if g.elias {
		coded := g.eliasPack(out[6:6+packed-1], codes)
		binary.LittleEndian.PutUint16(out[4:], uint16(coded))
		if coded > 0 {
			return 6 + coded
		}
	}
	g.pack(out[g.head():g.head()+packed], codes)
	return g.head() + packed
}

func (g *grid) readBlock(codes []uint16, in []byte) (took int, step float32, f fault) {
	head, packed := g.head(), g.packedBytes(len(codes))
	if len(in) < head {
		return 0, 0, badLength
	}
	step = math.Float32frombits(binary.LittleEndian.Uint32(in))
	if g.elias {
		if coded := int(binary.LittleEndian.Uint16(in[4:])); coded > 0 {
			if coded >= packed || len(in)-head < coded {
				return 0, 0, badLength
			}
			if !g.eliasUnpack(codes, in[head:head+coded]) {
				return 0, 0, badCode
			}
			return head + coded, step, sound
		}
	}
	if len(in)-head < packed {
		return 0, 0, badLength
	}
	g.unpack(codes, in[head:])
	for _, c := range codes {
		if g.kind != kindSign && int(c) > 2*g.levels {
			return 0, 0, badCode
		}
	}
	return head + packed, step, sound
}

// pack writes bit planes: bit t of byte i of plane j is bit j of code i + t·stride, where stride is ⌈n/8⌉.
func (g *grid) pack(out []byte, codes []uint16) {
	stride := (len(codes) + 7) / 8
	clear(out)
	for i, c := range codes {
		if g.bits == 8 {
			out[i] = byte(c)
			continue
		}
		for j := range g.bits {
			out[j*stride+i%stride] |= byte(c>>j&1) << (i / stride)
		}
	}
}

func (g *grid) unpack(codes []uint16, in []byte) {
	stride := (len(codes) + 7) / 8
	for i := range codes {
		if g.bits == 8 {
			codes[i] = uint16(in[i])
			continue
		}
		codes[i] = 0
		for j := range g.bits {
			codes[i] |= uint16(in[j*stride+i%stride]>>(i/stride)&1) << j
		}
	}
}

// Elias' gamma code of v = |level| + 1 is a zero for each bit below the highest, a one, and the bits below
// the highest; the sign follows where v > 1. The codes of 64 elements stand side by side: for each bit of v
// from the lowest, first whether it is the highest, of all that reach it, then the bit, of those that
// continue; last, the signs, 1 for negative. Elements are in the order of a plane; zeros
// fill its last byte.

// eliasPack writes codes and returns the bytes, or 0 where out is too small.
func (g *grid) eliasPack(out []byte, codes []uint16) int {
	stride := (len(codes) + 7) / 8
	clear(out)
	w := bitString{bytes: out}
	for from := 0; from < stride; from += 8 {
		var v, negative [64]int
		group := v[:8*min(8, stride-from)]
		for p := range group {
			group[p] = 1
			if i := from + p/8 + p%8*stride; i < len(codes) {
				level := int(codes[i]) - g.levels
				if level < 0 {
					level, negative[p] = -level, 1
				}
				group[p] += level
			}
		}
		for k, reach := 0, len(group); reach > 0; k++ {
			reach = 0
			for _, v := range group {
				if v>>k == 1 {
					w.put(1)
				} else if v>>k > 1 {
					w.put(0)
					reach++
				}
			}
			for _, v := range group {
				if v>>k > 1 {
					w.put(v >> k & 1)
				}
			}
		}
		for p, v := range group {
			if v > 1 {
				w.put(negative[p])
			}
		}
	}
	if w.at > 8*len(out) {
		return 0
	}
	return (w.at + 7) / 8
}

// eliasUnpack reads codes from in, and reports whether they fill its bytes exactly.
func (g *grid) eliasUnpack(codes []uint16, in []byte) bool {
	stride := (len(codes) + 7) / 8
	r := bitString{bytes: in}
	for from := 0; from < stride; from += 8 {
		var v [64]int
		var ended [64]bool
		group := v[:8*min(8, stride-from)]
		for k, reach := 0, len(group); reach > 0; k++ {
			if k == g.bits {
				return false
			}
			for p := range group {
				if !ended[p] && r.next() == 1 {
					group[p] |= 1 << k
					ended[p] = true
					reach--
				}
			}
			for p := range group {
				if !ended[p] {
					group[p] |= r.next() << k
				}
			}
		}
		for p, v := range group {
			level := v - 1
			if level > g.levels {
				return false
			}
			if level > 0 && r.next() == 1 {
				level = -level
			}
			if i := from + p/8 + p%8*stride; i < len(codes) {
				codes[i] = uint16(g.levels + level)
			}
		}
	}
	for r.at%8 != 0 {
		if r.next() != 0 {
			return false
		}
	}
	return r.at == 8*len(in)
}

// bitString is bytes as bits, the lowest of each byte first. Beyond the last byte bits read as zeros, and
// writes are lost.
type bitString struct {
	bytes []byte
	at    int // bits put or taken
}

func (b *bitString) put(bit int) {
	if b.at < 8*len(b.bytes) {
		b.bytes[b.at/8] |= byte(bit << (b.at % 8))
	}
	b.at++
}

func (b *bitString) next() (bit int) {
	if b.at < 8*len(b.bytes) {
		bit = int(b.bytes[b.at/8] >> (b.at % 8) & 1)
	}
	b.at++
	return bit
}
