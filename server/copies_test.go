package server

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/paceline/paceline/core/codec"
	"github.com/paceline/paceline/internal/options"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// follower is a rank that reads a held value, and has what the answers say.
type follower struct {
	by     codec.Codec
	copy   []byte
	number uint32
}

func (f *follower) take(t *testing.T, h wire.Header, payload []byte) {
	t.Helper()
	switch {
	case h.Type != wire.TypeResult:
		t.Fatalf("%v %s", h.Type, payload)
	case h.Codec == wire.CodecPlain:
		f.copy = payload
	case h.Flags&wire.FlagEmpty != 0:
		if h.Reference != f.number {
			t.Fatalf("nothing to add to copy %d for copy %d, and this rank has %d", f.number, h.Reference, f.number)
		}
	default:
		if err := f.by.DecodeAdd(f.copy, payload); err != nil {
			t.Fatal(err)
		}
	}
	f.number = h.Reference
}

// Ranks read and change a value while reference copies are evicted at any moment, and each copy is the same bits for all
// that have its number.
func TestRanksWithACopyHaveTheSameBitsWhateverIsEvicted(t *testing.T) {
	const n = 1024
	for _, c := range []struct {
		setting   string
		threshold float64
	}{{"int8:block=8", 0}, {"int8:block=8", 0.1}, {"none", 0.1}, {"topk:0.1", 0}, {"onebit:block=64", 0.01}} {
		b := newBench(t, 1<<20, false)
		tensor := coded(c.setting, under("asp", declared(1, "w", units.Accumulate, units.Sum, units.Float32, 4*n)))
		tensor.PullGate, tensor.Prescale, tensor.Postscale = options.Gate{Threshold: c.threshold}, 1, 1
		b.announce(tensor)
		b.hold(1, n, 0)
		by, _ := codec.Parse(c.setting)
		var seen sync.Map // bits by number of the copy
		t.Run(fmt.Sprint(c.setting, " gate ", c.threshold), func(t *testing.T) {
			for rank := range 3 {
				t.Run(fmt.Sprint(rank), func(t *testing.T) {
					t.Parallel()
					b, f := &bench{t: t, s: b.s, conns: b.conns}, &follower{by: by.Difference()}
					random := rand.New(rand.NewPCG(uint64(rank), 1))
					for i := range 200 {
						h := wire.Header{Type: wire.TypePull, Tensor: 1, Flags: wire.FlagNow, Reference: f.number}
						var payload []byte
						switch random.IntN(20) {
						case 0:
							h.Flags |= wire.FlagPlain
						case 1, 2, 3, 4, 5, 6, 7, 8, 9:
							h.Type, h.DType, h.Codec, h.Iteration = wire.TypePush, units.Float32, wire.CodecDeclared, uint64(i)
							payload = make([]byte, by.MaxEncoded(n))
							payload = payload[:by.Encode(payload, ones(n), make([]byte, by.ResidualBytes(n)), codec.Stream{Iteration: uint64(i)})]
						}
						b.send(rank, h, payload)
						if random.IntN(2) == 0 { // while it is served
							b.s.copies.Evict()
						}
						h, payload = b.receive(rank)
						f.take(t, h, payload)
						if first, other := seen.LoadOrStore(f.number, bytes.Clone(f.copy)); other && f.number > 0 && !bytes.Equal(first.([]byte), f.copy) {
							t.Errorf("copy %d is not the same bits as another rank's", f.number)
						}
					}
				})
			}
		})
	}
}
