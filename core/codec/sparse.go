package codec

import (
	"encoding/binary"
	"math"
	"slices"
)

// The forms of a sparse message, its first byte.
const (
	formSparse = 0
	formDense  = 1
)

// sparseBlock is the number of elements that share a count, so that offsets fit 16 bits.
const sparseBlock = 1 << 16

// maxSparse bounds the message of up to k of n elements. The dense form replaces it where that is shorter.
func maxSparse(n, k int) int {
	return 1 + min(sparseBytes(n, k), 4*n)
}

func sparseBytes(n, k int) int { return 4*((n+sparseBlock-1)/sparseBlock) + 6*k }

// writeSparse writes the elements of x that index lists, rising, in the shorter form, and makes them 0 in
// x where that is a residual. It returns the bytes written.
func writeSparse(dst, x []byte, index []uint32, residual feedback) int {
	v := of[float32](x)
	if sparseBytes(len(v), len(index)) >= 4*len(v) {
		dst[0] = formDense
		copy(dst[1:], x)
		if residual {
			clear(x)
		}
		return 1 + len(x)
	}
	dst[0] = formSparse
	at := 1
	for base := 0; base < len(v); base += sparseBlock {
		count := 0
		for count < len(index) && index[count] < uint32(base+sparseBlock) {
			count++
		}
		binary.LittleEndian.PutUint32(dst[at:], uint32(count))
		offsets, values := dst[at+4:at+4+2*count], dst[at+4+2*count:at+4+6*count]
		for i, e := range index[:count] {
			binary.LittleEndian.PutUint16(offsets[2*i:], uint16(e))
			binary.LittleEndian.PutUint32(values[4*i:], math.Float32bits(v[e]))
			if residual {
				v[e] = 0
			}
		}
		at += 4 + 6*count
		index = index[count:]
	}
	return at
}

// forget makes residuals 0 wherever the first of them is not finite, if the message says that something is not: the rest of such a gradient would go out in each of the
// next messages. index lists what is about to be sent, where that is not all.
func forget(index []uint32, residual []byte, more ...[]byte) {
	v := of[float32](residual)
	finite := func(f float32) bool { return f-f == 0 }
	if !slices.ContainsFunc(index, func(i uint32) bool { return !finite(v[i]) }) {
		return
	}
	sent := 0
	for i, f := range v {
		if sent < len(index) && index[sent] == uint32(i) {
			sent++
		} else if !finite(f) {
			v[i] = 0
			for _, other := range more {
				of[float32](other)[i] = 0
			}
		}
	}
}

// sparseFault checks a message for n elements; it returns the fault, "" if there is none.
func sparseFault(message []byte, n int) string {
	switch {
	case len(message) == 0:
		return "it is empty"
	case message[0] == formDense && len(message) == 1+4*n:
		return ""
	case message[0] == formDense:
		return "its length is not that of the tensor"
	case message[0] != formSparse:
		return "its form is not known"
	}
	rest := message[1:]
	for base := 0; base < n; base += sparseBlock {
		if len(rest) < 4 {
			return "it ends before its blocks do"
		}
		size := min(sparseBlock, n-base)
		count := int(binary.LittleEndian.Uint32(rest))
		if count > size {
			return "a block holds more elements than it has"
		}
		if rest = rest[4:]; len(rest) < 6*count {
			return "it ends before its blocks do"
		}
		last := -1
		for i := 0; i < 2*count; i += 2 {
			offset := int(binary.LittleEndian.Uint16(rest[i:]))
			if offset <= last {
				return "offsets do not rise"
			}
			last = offset
		}
		if last >= size {
			return "an offset lies beyond the tensor"
		}
		rest = rest[6*count:]
	}
	if len(rest) > 0 {
		return "it goes on after its last block"
	}
	return ""
}

// addSparse adds a checked message to v, or to zeros.
func addSparse(v []float32, message []byte, add bool) {
	if message[0] == formDense {
		if add {
			best.feed(raw(v), message[1:])
		} else {
			copy(raw(v), message[1:])
		}
		return
	}
	if !add {
		clear(v)
	}
	rest := message[1:]
	for ; len(v) > 0; v = v[min(sparseBlock, len(v)):] {
		count := int(binary.LittleEndian.Uint32(rest))
		offsets, values := rest[4:4+2*count], rest[4+2*count:4+6*count]
		for i := range count {
			v[binary.LittleEndian.Uint16(offsets[2*i:])] += math.Float32frombits(binary.LittleEndian.Uint32(values[4*i:]))
		}
		rest = rest[4+6*count:]
	}
}

// sparse is the common part of the codecs whose messages list elements.
type sparse struct {
	setting string
	feedback
}

func (c *sparse) String() string { return c.setting }

func (c *sparse) Unbiased() bool { return false }

func (c *sparse) Precise() bool { return false }

func (c *sparse) Decode(dst, message []byte) error { return c.decode(dst, message, false) }

func (c *sparse) DecodeAdd(acc, message []byte) error { return c.decode(acc, message, true) }

func (c *sparse) decode(dst, message []byte, add bool) error {
	n := elements(dst)
	if fault := sparseFault(message, n); fault != "" {
		return malformed(c, n, "%s", fault)
	}
	addSparse(of[float32](dst), message, add)
	return nil
}

// sumIn returns the tensor to choose from, and the one to add to it first: the residual and the gradient, or
// the gradient and none.
func (c *sparse) sumIn(src, residual []byte) (x, add []byte) {
	if c.feedback {
		return residual, src
	}
	return src, nil
}
