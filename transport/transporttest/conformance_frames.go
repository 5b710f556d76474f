package transporttest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"

	"github.com/paceline/paceline/transport/wire"
)

// sizes of payloads in bytes around everything that could be a boundary.
var sizes = []int{0, 1, 63, 64, 65, 4095, 4096, 8<<10 - 64, 8 << 10, 8<<10 + 1, 64<<10 - 1, 64<<10 + 1, 4<<20 - 1, 4 << 20, 4<<20 + 1, 0, 7}

var frameTests = map[string]func(*bench){
	"FramesOfEverySizeArriveInOrderBothWaysAtOnce": func(b *bench) {
		x, y := b.pair()
		var wg sync.WaitGroup
		wg.Go(func() {
			for i, size := range sizes {
				b.send(x, 1, i, size)
			}
		})
		wg.Go(func() {
			for i, size := range sizes {
				b.send(y, 2, i, size)
			}
		})
		wg.Go(func() {
			for i, size := range sizes {
				b.expect(x, 2, i, size)
			}
		})
		for i, size := range sizes {
			b.expect(y, 1, i, size)
		}
		wg.Wait()
	},

	"SeveralFramesLeaveInOneSend": func(b *bench) {
		x, y := b.pair()
		var all net.Buffers
		for i := range 1500 { // more buffers than the kernel takes at once
			all = append(all, buffers(frame(3, i, i%50))...)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			b.check(x.Send(all))
		})
		for i := range 1500 {
			b.expect(y, 3, i, i%50)
		}
		wg.Wait()
	},

	"NothingToSendIsNoError": func(b *bench) {
		x, _ := b.pair()
		b.must(x.Send(nil))
		b.must(x.Send(net.Buffers{nil, {}}))
		rest, busy, err := x.TrySend(net.Buffers{{}})
		if len(rest) > 0 || busy || err != nil {
			b.Errorf("rest %v, busy %v, error %v", rest, busy, err)
		}
	},

	"MemoryMayBeUsedAgainAfterSend": func(b *bench) {
		x, y := b.pair()
		var wg sync.WaitGroup
		wg.Go(func() {
			memory := make([]byte, 100<<10)
			for i := range 20 {
				fill(memory, 1, i)
				h := wire.Header{Type: wire.TypePush, Rank: 1, Iteration: uint64(i), Length: uint32(len(memory))}
				b.check(x.Send(net.Buffers{h.Append(nil), memory}))
				clear(memory)
			}
		})
		for i := range 20 {
			b.expect(y, 1, i, 100<<10)
		}
		wg.Wait()
	},

	"PayloadsAreReadExactlyAndInParts": func(b *bench) {
		x, y := b.pair()
		h, payload := frame(5, 0, 20_000)
		var wg sync.WaitGroup
		wg.Go(func() {
			b.send(x, 5, 0, 20_000)
			b.send(x, 5, 1, 3)
		})
		var got wire.Header
		b.must(y.ReadHeader(&got))
		if got != h {
			b.Errorf("header %+v, want %+v", got, h)
		}
		read := make([]byte, len(payload))
		b.must(y.ReadPayload(read[:1]))
		b.must(y.ReadPayload(read[1:1]))
		b.must(y.ReadPayload(read[1:9000]))
		if err := y.ReadHeader(&got); err == nil {
			b.Error("a header was read out of the middle of a payload")
		}
		b.must(y.ReadPayload(read[9000:]))
		if !bytes.Equal(read, payload) {
			b.Error("the payload was mixed up on the way")
		}
		if err := y.ReadPayload(make([]byte, 1)); err == nil {
			b.Error("more was read than the payload has")
		}
		b.expect(y, 5, 1, 3)
		wg.Wait()
	},

	"AnOversizeLengthEndsTheConnection": func(b *bench) {
		x, y := b.pair()
		h := wire.Header{Type: wire.TypePush, Length: 1<<32 - 1}
		b.must(x.Send(net.Buffers{h.Append(nil)}))
		var got wire.Header
		b.wantError(y.ReadHeader(&got), wire.ErrHeader, "limit")
		b.wantError(y.Send(net.Buffers{{1}}), wire.ErrHeader, "limit")
		y.Close() // as a reader does once it has told why
		if err := x.ReadHeader(&got); err == nil {
			b.Error("the sender of a bad frame was not cut off")
		}
	},

	"GarbageBetweenFramesEndsTheConnection": func(b *bench) {
		x, y := b.pair()
		b.send(x, 1, 0, 10)
		b.must(x.Send(net.Buffers{bytes.Repeat([]byte("garbage!"), 100)}))
		b.expect(y, 1, 0, 10)
		var got wire.Header
		b.wantError(y.ReadHeader(&got), wire.ErrHeader, y.RemoteAddr().String())
		y.Close()
		if err := x.ReadHeader(&got); err == nil {
			b.Error("the sender of garbage was not cut off")
		}
	},

	"ACloseBetweenFramesIsEOF": func(b *bench) {
		x, y := b.pair()
		b.send(x, 1, 0, 100)
		x.Close()
		b.expect(y, 1, 0, 100)
		var h wire.Header
		err := y.ReadHeader(&h)
		if b.wantError(err, io.EOF, y.RemoteAddr().String()); errors.Is(err, io.ErrUnexpectedEOF) {
			b.Error("a clean close was taken for one inside a frame")
		}
	},

	"ACloseInsideAHeaderIsUnexpected": func(b *bench) {
		x, y := b.pair()
		h, _ := frame(1, 0, 100)
		b.must(x.Send(net.Buffers{h.Append(nil)[:10]}))
		x.Close()
		b.wantError(y.ReadHeader(&h), io.ErrUnexpectedEOF, y.RemoteAddr().String())
	},

	"ACloseInsideAPayloadIsUnexpected": func(b *bench) {
		for _, sent := range []int{0, 40} {
			x, y := b.pair()
			h, payload := frame(1, 0, 100)
			b.must(x.Send(net.Buffers{h.Append(nil), payload[:sent]}))
			x.Close()
			b.must(y.ReadHeader(&h))
			b.wantError(y.ReadPayload(payload), io.ErrUnexpectedEOF, y.RemoteAddr().String())
		}
	},
}
