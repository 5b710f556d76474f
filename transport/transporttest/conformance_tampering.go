package transporttest

import (
	"bytes"
	"fmt"
	"net"
	"slices"
	"sync"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// between makes a connection through a relay that tampers with what the dialed end sends, or with the other direction.
func (b *bench) between(toListener, toDialer func() Tamper) (dialed, accepted transport.Conn) {
	b.Helper()
	l := b.listen(b.node())
	middle, err := b.RawListen()
	b.must(err)
	var relay sync.WaitGroup
	relay.Go(func() {
		Relay(middle, func() (net.Conn, error) { return b.RawDial(l.Addr().String()) }, b.Integrity == "all", toListener, toDialer)
	})
	dialed, err = b.dial(middle.Addr().String())
	b.must(err)
	accepted = b.accept(l)
	b.Cleanup(func() {
		middle.Close()
		dialed.Close()
		accepted.Close()
		relay.Wait()
	})
	return dialed, accepted
}

// once tampers with the frame of a number, the first being 0.
func once(number int, change func(frame []byte) []byte) func() Tamper {
	return func() Tamper {
		n := -1
		return func(frame []byte) []byte {
			if n++; n != number {
				return frame
			}
			return change(frame)
		}
	}
}

// flip changes a bit.
func flip(at int) func(frame []byte) []byte {
	return func(frame []byte) []byte {
		frame[at] ^= 0x10
		return frame
	}
}

// control sends a message whose payload has a tag whatever the setting.
func (b *bench) control(c transport.Conn, number, size int) {
	b.Helper()
	h, payload := frame(1, number, size)
	h.Type = wire.TypeControl
	_ = c.Send(buffers(h, payload)) // the connection may have ended
}

// refuses checks that an end gets the first frames as they were sent, no other, and the reason for its end.
func (b *bench) refuses(c transport.Conn, good int, what string) {
	b.Helper()
	for number := range good {
		if h, err := b.receive(c); err != nil || int(h.Iteration) != number {
			b.Errorf("%s: frame %d came as %d: %v", what, number, h.Iteration, err)
			return
		}
	}
	h, err := b.receive(c)
	if err == nil {
		b.Errorf("%s: frame %d came behind the first %d", what, h.Iteration, good)
		return
	}
	if b.wantError(err, transport.ErrIntegrity, c.RemoteAddr().String()); b.Failed() {
		b.Log(what)
	}
	b.wantError(c.Send(buffers(frame(1, 0, 10))), transport.ErrIntegrity, "")
}

var tamperTests = map[string]func(*bench){
	"AChangedBitEndsTheConnection": func(b *bench) {
		const size = 100
		for at := 0; at < wire.HeaderSize+wire.TagSize+size+wire.TagSize; at += 3 {
			x, y := b.between(once(1, flip(at)), nil)
			go func() {
				for number := range 3 {
					b.control(x, number, size)
				}
			}()
			b.refuses(y, 1, fmt.Sprintf("bit of byte %d", at))
		}
	},

	"AChangedBitOnTheWayBackEndsTheConnection": func(b *bench) {
		x, y := b.between(nil, once(0, flip(wire.HeaderSize+wire.TagSize)))
		go b.control(y, 0, 100)
		b.refuses(x, 0, "first byte of the payload")
	},

	"FramesThatAreRepeatedDroppedOrMovedEndTheConnection": func(b *bench) {
		for what, tamper := range map[string]struct {
			good   int
			tamper func() Tamper
		}{
			"repeated": {2, once(1, func(frame []byte) []byte { return slices.Concat(frame, frame) })},
			"dropped":  {1, once(1, func([]byte) []byte { return nil })},
			"cut":      {1, once(1, func(frame []byte) []byte { return frame[:len(frame)-wire.TagSize] })}, // of one byte the next frame may begin with the same
			"moved": {0, func() Tamper {
				var held []byte
				return func(frame []byte) []byte {
					if held == nil {
						held = frame
						return nil
					}
					return slices.Concat(frame, held)
				}
			}},
			"inserted": {1, once(0, func(frame []byte) []byte {
				h, payload := DecodedFrame(frame)
				h.Iteration = 1
				return slices.Concat(frame, h.Append(nil), make([]byte, wire.TagSize), payload, make([]byte, wire.TagSize))
			})},
		} {
			x, y := b.between(tamper.tamper, nil)
			go func() {
				for number := range 4 {
					b.control(x, number, 50)
				}
			}()
			b.refuses(y, tamper.good, what)
		}
	},

	"FramesOfAnotherConnectionOrDirectionEndTheConnection": func(b *bench) {
		recorded := make(chan []byte, 2)
		record := once(0, func(frame []byte) []byte {
			recorded <- bytes.Clone(frame)
			return frame
		})
		replay := once(0, func([]byte) []byte { return <-recorded })
		x, y := b.between(record, nil)
		b.control(x, 0, 50)
		b.refusesNothing(y)
		x, y = b.between(replay, nil)
		b.control(x, 0, 50)
		b.refuses(y, 0, "of another connection")

		x, y = b.between(record, replay)
		b.control(x, 0, 50)
		b.refusesNothing(y)
		b.control(y, 0, 50)
		b.refuses(x, 0, "reflected")
	},

	"ALargePayloadIsCheckedChunkByChunk": func(b *bench) {
		const size = 2*wire.ChunkBytes + 1000
		second := wire.HeaderSize + wire.TagSize + wire.ChunkBytes + wire.TagSize
		for what, change := range map[string]func(frame []byte) []byte{
			"changed": flip(second + 5),
			"swapped": func(frame []byte) []byte {
				first := second - wire.ChunkBytes - wire.TagSize
				return slices.Concat(frame[:first], frame[second:second+wire.ChunkBytes+wire.TagSize], frame[first:second], frame[second+wire.ChunkBytes+wire.TagSize:])
			},
		} {
			x, y := b.between(once(0, change), nil)
			go b.control(x, 0, size)
			var h wire.Header
			b.must(y.ReadHeader(&h))
			chunk := make([]byte, wire.ChunkBytes)
			err := y.ReadPayload(chunk)
			if what == "changed" {
				b.must(err)
				_, want := frame(1, 0, size)
				if !bytes.Equal(chunk, want[:len(chunk)]) {
					b.Error("the first chunk arrived with other bytes")
				}
				err = y.ReadPayload(chunk[:1])
			}
			b.wantError(err, transport.ErrIntegrity, y.RemoteAddr().String())
		}
	},

	"ThePayloadOfATensorHasTagsWhereTheSettingOrTheFrameAsksForThem": func(b *bench) {
		for _, flags := range []wire.Flags{0, wire.FlagAuthenticated} {
			x, y := b.between(once(0, flip(wire.HeaderSize+wire.TagSize+7)), nil)
			h, payload := frame(1, 0, 100)
			h.Flags = flags
			b.must(x.Send(buffers(h, payload)))
			var got wire.Header
			b.must(y.ReadHeader(&got))
			err := y.ReadPayload(payload)
			if flags == 0 && b.Integrity == "control" {
				b.must(err) // what the setting leaves out
			} else {
				b.wantError(err, transport.ErrIntegrity, "a push")
			}
		}
	},

	"TamperingHarmsNoOtherConnection": func(b *bench) {
		x, y := b.pair()
		spoiled, end := b.between(once(0, flip(0)), nil)
		b.control(spoiled, 0, 10)
		b.refuses(end, 0, "first bit")
		b.send(x, 1, 0, 10)
		b.expect(y, 1, 0, 10)
	},
}

// refusesNothing reads one frame.
func (b *bench) refusesNothing(c transport.Conn) {
	b.Helper()
	if _, err := b.receive(c); err != nil {
		b.Error(err)
	}
}

// DecodedFrame takes a frame with tags apart, as a relay sees it; the payload is its first chunk.
func DecodedFrame(tagged []byte) (h wire.Header, payload []byte) {
	if err := h.Decode(tagged); err != nil {
		panic(err)
	}
	behind := tagged[wire.HeaderSize+wire.TagSize:]
	return h, behind[:min(len(behind), int(h.Length), wire.ChunkBytes)]
}
