package codec

import (
	"encoding/binary"
	"math"
)

// randomK sends one element from each of k strata of equal length (to one). The stream determines which, so
// the message needs no indices. With a residual, elements are sent as they are; without, times the length of
// their stratum, which makes the message unbiased.
type randomK struct {
	setting string
	share
	feedback
}

// newRandomK takes a share or count=, warmup= and feedback=.
func newRandomK(a *Arguments) Codec {
	return randomKOf(a.share(0.01), a.Feedback(true))
}

func randomKOf(s share, residual bool) Codec {
	return &randomK{Setting("randomk", append(s.parts(), FeedbackPart(residual, true))...), s, feedback(residual)}
}

func (c *randomK) Answer() Codec { return c }

// Difference is the codec with a residual: without one it sends elements times the length of their stratum.
func (c *randomK) Difference() Codec { return randomKOf(c.share, true) }

func (c *randomK) Precise() bool { return false }

func (c *randomK) String() string { return c.setting }

func (c *randomK) Unbiased() bool { return !bool(c.feedback) }

func (c *randomK) MaxEncoded(n int) int { return max(8+4*c.most(n), 1) }

// formNaN is a message that makes every element NaN.
const formNaN = 1

func (c *randomK) Encode(dst, src, residual []byte, s Stream) int {
	n := checkEncode(c, dst, src, residual)
	if n == 0 {
		return 0
	}
	x := src
	var add []byte
	if c.feedback {
		x, add = residual, src
	}
	if best.feed(x, add) >= infinite {
		if c.feedback {
			clear(residual)
		}
		dst[0] = formNaN
		return 1
	}
	number := s.number()
	binary.LittleEndian.PutUint64(dst, number)
	v, at := of[float32](x), 8
	for i, length := range strata(n, c.at(n, s.Iteration), keysOf(number)) {
		f := v[i]
		if c.feedback {
			v[i] = 0
		} else {
			f *= float32(length)
		}
		binary.LittleEndian.PutUint32(dst[at:], math.Float32bits(f))
		at += 4
	}
	return at
}

// strata cuts n elements into k and yields a random one of each, with the stratum's length.
func strata(n, k int, draws keys) func(yield func(element, length int) bool) {
	return func(yield func(int, int) bool) {
		for j := range k {
			begin, end := j*n/k, (j+1)*n/k
			length := end - begin
			if !yield(begin+int(uint64(draws.draw(uint32(j)))*uint64(length)>>32), length) {
				return
			}
		}
	}
}

func (c *randomK) Decode(dst, message []byte) error { return c.decode(dst, message, false) }

func (c *randomK) DecodeAdd(acc, message []byte) error { return c.decode(acc, message, true) }

func (c *randomK) decode(dst, message []byte, add bool) error {
	if err := c.check(dst, message); err != nil {
		return err
	}
	if !add {
		clear(dst)
	}
	c.add(of[float32](dst), message)
	return nil
}

func (c *randomK) check(dst, message []byte) error {
	n := elements(dst)
	switch k := (len(message) - 8) / 4; {
	case n == 0 && len(message) == 0, n > 0 && len(message) == 1 && message[0] == formNaN:
		return nil
	case n == 0 || len(message) < 12 || len(message)%4 != 0 || k > c.most(n):
		return malformed(c, n, "%d bytes are not 8 and 4 for each of 1 to %d elements", len(message), c.most(n))
	}
	return nil
}

func (c *randomK) add(v []float32, message []byte) {
	switch len(message) {
	case 0:
		return
	case 1:
		for i := range v {
			v[i] = float32(math.NaN())
		}
		return
	}
	values := message[8:]
	for i := range strata(len(v), len(values)/4, keysOf(binary.LittleEndian.Uint64(message))) {
		v[i] += math.Float32frombits(binary.LittleEndian.Uint32(values))
		values = values[4:]
	}
}
