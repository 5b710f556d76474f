package codec

import (
	"cmp"
	"fmt"
	"runtime"
	"sync"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
)

// stages are the lossless stages, by the number that is the first byte of a message; after 0 the message
// follows unchanged.
var stages = []string{"s2", "zstd"}

const (
	formAsItIs = iota
	formS2
	formZstd
)

// A stage pays where it saves an eighth: less is not worth the time at either end. For long messages a trial
// on a part decides.
const (
	trialBytes = 16 << 10
	savesPart  = 8
)

// windowBytes is zstd's window: gradients have no distant repetitions.
const windowBytes = 256 << 10

// lossless compresses the messages of a codec where that pays; the message alone determines that.
type lossless struct {
	Codec
	stage string
	form  byte
	pool  sync.Pool // of *[]byte: messages of the codec
}

// zstds are one encoder and one decoder for all tensors: each has memory, up to megabytes, for every goroutine that uses it at a time.
var zstds = sync.OnceValues(func() (*zstd.Encoder, *zstd.Decoder) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false), zstd.WithWindowSize(windowBytes), zstd.WithEncoderConcurrency(runtime.NumCPU()))
	dec, other := zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true), zstd.WithDecoderConcurrency(runtime.NumCPU()))
	if err = cmp.Or(err, other); err != nil {
		panic(fmt.Sprintf("codec: options of zstd: %v", err)) // they are constants
	}
	return enc, dec
})

func newLossless(c Codec, stage string) Codec {
	l := &lossless{Codec: c, stage: stage, form: formS2}
	if stage == "zstd" {
		l.form = formZstd
	}
	return l
}

func (l *lossless) String() string { return l.Codec.String() + "+" + l.stage }

func (l *lossless) MaxEncoded(n int) int { return 1 + l.Codec.MaxEncoded(n) }

func (l *lossless) Answer() Codec { return l.around(l.Codec.Answer()) }

func (l *lossless) Difference() Codec { return l.around(l.Codec.Difference()) }

// Momentum implements [Momentum].
func (l *lossless) Momentum() float64 { return momentumOf(l.Codec) }

// around puts the stage around another codec.
func (l *lossless) around(c Codec) Codec {
	if c.String() == l.Codec.String() {
		return l
	}
	return newLossless(c, l.stage)
}

func (l *lossless) Encode(dst, src, residual []byte, s Stream) int {
	n := checkEncode(l, dst, src, residual)
	room := l.scratch(roomFor(l.Codec.MaxEncoded(n)))
	defer l.pool.Put(room)
	size := l.Codec.Encode(dst[1:], src, residual, s)
	message := dst[1 : 1+size]
	dst[0] = formAsItIs
	part := message[:min(size, trialBytes)]
	if size > trialBytes {
		middle := (size - trialBytes) / 2
		part = message[middle : middle+trialBytes]
	}
	if !pays(l.compress(*room, part), part) {
		return 1 + size
	}
	if small := l.compress(*room, message); pays(small, message) {
		dst[0] = l.form
		return 1 + copy(dst[1:], small)
	}
	return 1 + size
}

func pays(small, message []byte) bool { return len(small) < len(message)-len(message)/savesPart }

// roomFor bounds what either stage writes for n incompressible bytes.
func roomFor(n int) int { return s2.MaxEncodedLen(n) + n>>10 + 64 }

// compress writes to room, of roomFor's size.
func (l *lossless) compress(room, message []byte) []byte {
	if l.form == formS2 {
		return s2.Encode(room[:cap(room)], message)
	}
	enc, _ := zstds()
	return enc.EncodeAll(message, room[:0])
}

func (l *lossless) Decode(dst, message []byte) error {
	return l.decoded(dst, message, l.Codec.Decode)
}

func (l *lossless) DecodeAdd(acc, message []byte) error {
	return l.decoded(acc, message, l.Codec.DecodeAdd)
}

// decoded returns the original message. It never uses more memory than the codec's longest message.
func (l *lossless) decoded(dst, message []byte, next func(dst, message []byte) error) error {
	n := elements(dst)
	if len(message) == 0 {
		return malformed(l, n, "it is empty")
	}
	form, message := message[0], message[1:]
	if form == formAsItIs {
		return next(dst, message)
	}
	if form != l.form {
		return malformed(l, n, "its form %d is not known", form)
	}
	most := l.Codec.MaxEncoded(n)
	room := l.scratch(most)
	defer l.pool.Put(room)
	plain, err := l.expand((*room)[:0:most], message)
	if err != nil {
		return malformed(l, n, "%v", err)
	}
	return next(dst, plain)
}

// expand writes to the capacity of room.
func (l *lossless) expand(room, message []byte) ([]byte, error) {
	if l.form == formZstd {
		_, dec := zstds()
		return dec.DecodeAll(message, room)
	}
	size, err := s2.DecodedLen(message)
	if err != nil {
		return nil, err
	}
	if size > cap(room) {
		return nil, fmt.Errorf("it expands to %d bytes, the limit is %d", size, cap(room))
	}
	return s2.Decode(room[:cap(room)], message)
}

// scratch gives memory with room for n bytes.
func (l *lossless) scratch(n int) *[]byte {
	room, ok := l.pool.Get().(*[]byte)
	if !ok {
		room = new([]byte)
	}
	if cap(*room) < n {
		*room = make([]byte, 0, n)
	}
	return room
}
