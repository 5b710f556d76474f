package transporttest

import (
	"errors"
	"io"
	"net"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// startReading and startSending do so in the background and report how it ended.
func (b *bench) startReading(c transport.Conn) chan error {
	done := make(chan error, 1)
	go func() {
		for {
			var h wire.Header
			err := c.ReadHeader(&h)
			if err == nil {
				err = c.ReadPayload(make([]byte, h.Length))
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	return done
}

func (b *bench) startSending(c transport.Conn, out net.Buffers) chan error {
	done := make(chan error, 1)
	go func() { done <- c.Send(out) }()
	return done
}

var endTests = map[string]func(*bench){
	"CloseWakesReadersAndSendersOnBothSides": func(b *bench) {
		x, y := b.pair()
		rest, _ := b.fillUp(x, 1, 0)
		backRest, _ := b.fillUp(y, 2, 0)
		sending := b.startSending(x, rest)
		waiting := b.startSending(x, buffers(frame(1, 1, 10)))
		back := b.startSending(y, backRest)
		b.must(x.Close())
		for _, done := range []chan error{sending, waiting} {
			b.wantError(<-done, net.ErrClosed, "")
		}
		if err := <-back; err == nil {
			b.Error("a send to a peer that closed the connection succeeded")
		}
		b.wantError(<-b.startReading(x), net.ErrClosed, "")
		if err := <-b.startReading(y); err == nil {
			b.Error("reading from a peer that closed the connection succeeded")
		}
	},

	"CloseWakesAReaderThatWaits": func(b *bench) {
		x, y := b.pair()
		here, there := b.startReading(x), b.startReading(y)
		b.must(x.Close())
		b.wantError(<-here, net.ErrClosed, "")
		b.wantError(<-there, io.EOF, y.RemoteAddr().String())
	},

	"CloseWakesThoseWhoWaitForTheSenderOfARest": func(b *bench) {
		x, _ := b.pair()
		b.fillUp(x, 1, 0) // and never sends the rest
		waiting := b.startSending(x, buffers(frame(2, 0, 10)))
		b.must(x.Close())
		b.wantError(<-waiting, net.ErrClosed, "")
	},

	"AClosedConnectionTakesNothing": func(b *bench) {
		x, _ := b.pair()
		b.must(x.Close())
		b.must(x.Close())
		b.wantError(x.Send(buffers(frame(1, 0, 10))), net.ErrClosed, "")
		_, _, err := x.TrySend(buffers(frame(1, 0, 10)))
		b.wantError(err, net.ErrClosed, "")
		var h wire.Header
		b.wantError(x.ReadHeader(&h), net.ErrClosed, "")
	},

	"SendingToAPeerThatIsGoneFailsForGood": func(b *bench) {
		x, y := b.pair()
		b.must(y.Close())
		var err error
		for err == nil { // the first ones may leave before the news arrives
			err = x.Send(buffers(frame(1, 0, 10_000)))
		}
		again := x.Send(buffers(frame(1, 0, 10)))
		if again == nil || again.Error() != err.Error() {
			b.Errorf("first %v, then %v", err, again)
		}
		if _, _, tried := x.TrySend(buffers(frame(1, 0, 10))); tried == nil {
			b.Error("a connection that failed took something")
		}
	},

	"WhatWasSentBeforeACloseArrives": func(b *bench) {
		x, y := b.pair()
		for i := range 10 {
			b.send(x, 1, i, 20)
		}
		b.must(x.Close())
		for i := range 10 {
			b.expect(y, 1, i, 20)
		}
		_, err := b.receive(y)
		b.wantError(err, io.EOF, "")
	},

	"ASilentPeerIsNoticed": func(b *bench) {
		if b.Silence == nil {
			b.Skip("a test cannot silence the links of this backend")
		}
		x, y := b.pair()
		b.Silence()
		sending := b.startSending(x, buffers(frame(1, 0, 10*b.MaxBuffered)))
		for _, done := range []chan error{sending, b.startReading(x), b.startReading(y)} {
			var timeout net.Error
			if err := <-done; !errors.As(err, &timeout) || !timeout.Timeout() {
				b.Errorf("error %v, want one that says it timed out", err)
			}
		}
	},
}
