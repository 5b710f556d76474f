// Package codec compresses gradients for transport, to the server and back.
//
// # Use
//
// [Parse] makes a [Codec] of a setting such as "topk:0.01" or "int8:block=512+s2". A codec takes
// float32 tensors (one partition at a time) as raw bytes in the machine's byte order, at any alignment.
// It holds no state of any tensor and serves many goroutines at once:
//
//	buf := make([]byte, c.MaxEncoded(n))                 // allocated once
//	residual := make([]byte, c.ResidualBytes(n))         // zeros at first; kept beside the key
//	m := c.Encode(buf, gradient, residual, stream)       // buf[:m] goes out
//	err := c.DecodeAdd(sum, buf[:m])                     // at the other end
//
// The receiver knows the codec and n from the declaration of the tensor; messages say neither.
//
// # Residuals
//
// A lossy codec keeps what it drops in a residual (error feedback): it encodes gradient + residual, and the
// residual becomes what the message lacks of that. So message plus residual equal the input, to the rounding
// of one float32 subtraction; for the sparse codecs, exactly. "feedback=on" and "feedback=off" override the
// default of any codec. Each direction has its own residuals.
//
// # Randomness
//
// Stochastic codecs draw from a [Stream], a counter without state: equal seed, worker,
// iteration and key give equal bytes, on every machine.
//
// # Codecs
//
// Bits are per element with the defaults and without the lossless stage; n is the number of elements.
// "Residual" is the default for feedback.
//
//	setting                          bits   unbiased  residual  loses when
//	none                             32     exact     no        there is a network
//	fp16                             16     no        no        values leave ±65504 (they become infinite) or lie below 6e-8
//	bf16                             16     no        no        more than 8 bits of the mantissa matter
//	int8:block=512                   8.06   yes       no        one outlier in a block sets the grid for all of it
//	int4:block=512                   4.06   yes       no        as int8, at a 16x smaller outlier; noise grows with the spread
//	qsgd:levels=7,block=256          4.13   yes       no        blocks are long: the norm, and so the noise, grows as their square root;
//	                                                            int4 has less noise for the same bits
//	qsgd:levels=7,coding=elias       ~2.2   yes       no        the link is fast: a core encodes 3 and decodes 6 GB/s of gradients, half of int4
//	terngrad:clip=2.5,block=4096     2.01   to ±clip  no        gradients are heavy-tailed: what lies beyond the clip is cut off
//	natural:levels=7,block=512       4.06   yes       no        noise matters: it is up to 1/8 of an element's square, whatever the levels
//	onebit:block=1024                1.03   no        yes       the first iterations matter, or the tensor is a bias or an embedding
//	topk:0.01                        0.48   no        yes       gradients are not concentrated; workers differ in what they choose, so sums fill up
//	randomk:0.01                     0.32   no        yes       at most shares: it sends arbitrary elements, not the large ones
//	threshold:0.001                  ≤ 32   no        yes       the size of gradients changes while training runs, and the threshold does not
//	dgc:0.001                        ≤ 12   no        yes       training is short: it needs its warm-up; two buffers of residual
//
// The suffix "+s2" or "+zstd" compresses the message without loss, where a trial on a part of it shows
// that this pays. Random mantissas never do; zeros of a coarse grid, and indices, do.
//
// # NaN and infinity
//
// Nothing is dropped silently. none, fp16, bf16, topk, threshold and dgc carry NaN and infinity as
// such (topk and dgc before everything else; what is more than they send is left out, not kept). In codecs with
// a scale per block (int8, int4, qsgd, terngrad, natural, onebit) such an element makes its whole
// block NaN; so does a scale that float32 does not hold. randomk makes the tensor NaN. The residual of
// an element that is NaN or infinite is 0 after that, so that one bad step does not spoil the following ones.
//
// # Wire formats
//
// Numbers are little-endian. Tensors are cut into blocks, the last one being shorter.
//
//	none        n × float32
//	fp16, bf16  n × 16 bits
//	blockwise   per block of m: float32 step, then ⌈m/8⌉ bytes for each bit of a code (bit t of byte i of
//	            plane j is bit j of code i + t·⌈m/8⌉); a code of 8 bits is a byte.
//	            int8, int4, qsgd, terngrad: code − levels times step. onebit: ±step.
//	            natural: step·2^(|code − levels| − levels) with the sign of code − levels, 0 for 0.
//	elias       per block: float32 step, uint16 bytes; 0 bytes: packed as above; else Elias' gamma code of
//	            |code − levels| + 1, and a sign bit where that is over 1, of each 64 codes side by side, lowest
//	            bits first (reference.go has the order)
//	sparse      a byte 0, then per block of 65,536: uint32 count, count × uint16 offset (rising), count × float32;
//	            or a byte 1 and n × float32, where that is not longer
//	randomk     uint64 key, then k × float32, one from each of k strata at places that follow from the key;
//	            or only a byte 1: the tensor is NaN
//	+s2, +zstd  a byte (0 as it is, 1 s2, 2 zstd), then the message
//
// [Codec.MaxEncoded] is the exact length where that does not depend on the data, and otherwise the greatest.
// Decoding checks the whole message before it touches the destination.
//
// # A new codec
//
// Write one file with a function that takes the arguments and returns a Codec, and add its line to the
// table in registry.go, or, in a package outside, call [Register]. Add its settings to the list in codec_test.go: the
// tests check each of them against this page. The engine and the server know no codec by name.
package codec

import (
	"fmt"
	"hash/fnv"
	"math"
)

// MaxElements bounds a codec's tensors, in elements: indices have 32 bits and a partition is at most a
// quarter of this.
const MaxElements = 1 << 30

// Codec encodes tensors of n float32 elements, and decodes them. Methods do not allocate after their
// scratch memory has grown. Destinations and sources do not overlap.
type Codec interface {
	// String is the setting that Parse makes this codec of.
	String() string

	// MaxEncoded bounds the bytes of a message of n elements.
	MaxEncoded(n int) int

	// ResidualBytes is the size of the residual of a tensor of n elements, 0 for a codec that has none.
	// It holds whole tensors of float32, one after the other. A new residual is zeros.
	ResidualBytes(n int) int

	// Unbiased reports whether the mean of the decoded tensor, over streams, is the encoded one.
	Unbiased() bool

	// Answer is the codec of a server's answers to pushes with this codec: this codec, unless part of it belongs
	// to the worker, such as a momentum.
	Answer() Codec

	// Difference is the codec for the change of a tensor that was sent before. Both ends add the decoded message to
	// the receiver's copy, so what a message lacks is part of the next difference, and no residual is kept (a codec
	// that takes one gets zeros each time). The copy converges only if a message is nearer to the difference than
	// zero is; to be unbiased is not enough.
	Difference() Codec

	// Precise reports whether a message is near enough to the tensor to replace it where a tensor is needed, not a
	// sum of many.
	Precise() bool

	// Encode writes src plus the residual to dst, which has room for MaxEncoded. It leaves in the residual
	// what it did not write, and returns the number of bytes written.
	Encode(dst, src, residual []byte, s Stream) int

	// Decode sets dst to the tensor of a message. An error describes the fault of the message and leaves dst
	// unchanged.
	Decode(dst, message []byte) error

	// DecodeAdd adds the tensor of a message to acc, elements of float32; with a sparse codec in time
	// proportional to the message. An error leaves acc unchanged.
	DecodeAdd(acc, message []byte) error
}

// Stream identifies the random numbers of one message. Independent messages differ in some field.
type Stream struct {
	Seed      uint64 // the job's
	Worker    uint32 // rank of the sender; ServerSide for a server
	Iteration uint64 // or the version that a server sends
	Key       uint64 // partition of a tensor
}

// KeyOf is the Key of streams for a partition of a tensor: it follows from names alone, so that a repeated job
// draws the same numbers in whatever order it declares its tensors.
func KeyOf(processSet uint32, name string, part uint32) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d/%d/%s", processSet, part, name)
	return h.Sum64()
}

// ServerSide is the Worker of streams that servers draw from.
const ServerSide = math.MaxUint32

// number makes 64 pseudo-random bits of the stream, which depend on every field.
func (s Stream) number() uint64 {
	h := mix(s.Seed)
	h = mix(h ^ uint64(s.Worker))
	h = mix(h ^ s.Iteration)
	return mix(h ^ s.Key)
}

func (s Stream) keys() keys { return keysOf(s.number()) }

// mix is a bijection of which each bit depends on all bits (splitmix64's).
func mix(h uint64) uint64 {
	h += 0x9e3779b97f4a7c15
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}

// keys select the 32-bit numbers that the elements of a message draw.
type keys struct{ k0, k1 uint32 }

func keysOf(number uint64) keys { return keys{uint32(number), uint32(number >> 32)} }

// draw gives 32 random bits for element i. The kernels compute the same.
func (k keys) draw(i uint32) uint32 {
	h := (i ^ k.k0) * 0x9e3779b1
	h = (h ^ h>>16) * 0x7feb352d
	h = ((h ^ h>>15) + k.k1) * 0x846ca68b
	return h ^ h>>16
}

// elements is the number of elements of a tensor of these bytes.
func elements(tensor []byte) int {
	if len(tensor)%4 != 0 || len(tensor)/4 > MaxElements {
		panic(fmt.Sprintf("codec: %d bytes are not a tensor of float32 with up to %d elements", len(tensor), MaxElements))
	}
	return len(tensor) / 4
}

// checkEncode panics when lengths do not match, which would corrupt memory in C: the caller gets them from
// MaxEncoded and ResidualBytes. It returns the number of elements.
func checkEncode(c Codec, dst, src, residual []byte) int {
	n := elements(src)
	if len(dst) < c.MaxEncoded(n) || len(residual) != c.ResidualBytes(n) {
		panic(fmt.Sprintf("codec %s: %d elements need room for %d bytes and a residual of %d, got %d and %d",
			c, n, c.MaxEncoded(n), c.ResidualBytes(n), len(dst), len(residual)))
	}
	return n
}

// malformed is the error of a faulty message.
func malformed(c fmt.Stringer, n int, format string, args ...any) error {
	return fmt.Errorf("codec %s: malformed message for %d elements: %s; do both ends have the same codec?", c, n, fmt.Sprintf(format, args...))
}

// feedback is whether a codec keeps a residual, of one tensor.
type feedback bool

func (f feedback) ResidualBytes(n int) int {
	if f {
		return 4 * n
	}
	return 0
}
