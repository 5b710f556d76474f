package transporttest

import (
	"bytes"
	"math"
	"net"
	"sync"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// writable is one end of a connection with one-sided writes.
type writable struct {
	transport.Conn
	transport.OneSided
	registrar transport.Registrar
}

// pairs makes connections with one-sided writes, or skips the test where the backend has none.
func (b *bench) pairs() (connect func() (writer, owner writable)) {
	b.Helper()
	t := b.node()
	registrar, ok := t.(transport.Registrar)
	if !ok {
		b.Skipf("no memory can be registered with %s", t.Kind())
	}
	l := b.listen(t)
	both := func(c transport.Conn) writable {
		o, ok := c.(transport.OneSided)
		if !ok {
			b.Skipf("connections of %s have no one-sided writes", t.Kind())
		}
		return writable{c, o, registrar}
	}
	return func() (writer, owner writable) {
		b.Helper()
		x, err := b.dialWithin(patience, t, l.Addr().String())
		b.must(err)
		return both(x), both(b.accept(l))
	}
}

// register registers fresh memory, until the test ends.
func (b *bench) register(e writable, size int) transport.Region {
	b.Helper()
	r, err := e.registrar.Register(make([]byte, size))
	b.must(err)
	b.Cleanup(r.Release)
	return r
}

// grant grants a part of a region, and encodes and decodes its token as on the wire.
func (b *bench) grant(e writable, r transport.Region, offset, length int) (t wire.Token) {
	b.Helper()
	given, err := e.Grant(r, offset, length)
	b.must(err)
	b.must(t.Decode(given.Append(nil)))
	return t
}

// content is unique bytes.
func content(number, size int) []byte {
	data := make([]byte, size)
	fill(data, 77, number)
	return data
}

// lost checks that a refused write has ended a connection at the owner's end.
func (b *bench) lost(owner writable) {
	b.Helper()
	b.wantError(<-b.startReading(owner), transport.ErrAccess, owner.RemoteAddr().String())
	b.wantError(owner.Send(buffers(frame(1, 0, 10))), transport.ErrAccess, "")
}

// untouched checks that no write has changed memory.
func (b *bench) untouched(memory, want []byte) {
	b.Helper()
	if !bytes.Equal(memory, want) {
		b.Error("a write changed memory that was not granted")
	}
}

var memoryTests = map[string]func(*bench){
	"AFrameBehindAWriteFindsItsBytes": func(b *bench) {
		x, y := b.pairs()()
		for i, ends := range [][2]writable{{x, y}, {y, x}} {
			from, to := ends[0], ends[1]
			for number, size := range sizes {
				data := content(number, size+1)
				r := b.register(to, len(data))
				token := b.grant(to, r, 0, len(data))
				var wg sync.WaitGroup
				wg.Go(func() {
					b.check(from.WriteTo(token, 0, net.Buffers{data[:size/2], {}, data[size/2:]}))
					b.send(from, i, number, 5)
				})
				b.expect(to, i, number, 5)
				if !bytes.Equal(r.Memory(), data) {
					b.Errorf("the frame behind a write of %d bytes arrived before these", len(data))
				}
				wg.Wait()
				r.Release()
			}
		}
	},

	"AWriteGoesToItsPlaceAndNowhereElse": func(b *bench) {
		x, y := b.pairs()()
		r := b.register(y, 1000)
		want := make([]byte, 1000)
		for number, part := range [][2]int{{0, 10}, {100, 50}, {990, 10}} {
			offset, length := part[0], part[1]
			token := b.grant(y, r, offset, length)
			data := content(number, length-5)
			copy(want[offset+3:], data)
			b.must(x.WriteTo(token, 3, net.Buffers{data}))
		}
		b.must(x.WriteTo(wire.Token{}, 0, net.Buffers{nil, {}})) // no byte is no write
		b.send(x, 1, 0, 5)
		b.expect(y, 1, 0, 5)
		b.untouched(r.Memory(), want)
	},

	"WritesAndSendsOfManyDoNotMix": func(b *bench) {
		const writers, size, rounds = 4, 50_000, 10
		x, y := b.pairs()()
		r := b.register(y, writers*size)
		var wg sync.WaitGroup
		for w := range writers {
			token := b.grant(y, r, w*size, size)
			wg.Go(func() {
				for i := range rounds {
					b.check(x.WriteTo(token, 0, net.Buffers{content(w*rounds+i, size)}))
					b.send(x, w, i, 3000)
				}
			})
		}
		for range writers * rounds {
			_, err := b.receive(y)
			b.must(err)
		}
		wg.Wait()
		for w := range writers {
			if !bytes.Equal(r.Memory()[w*size:(w+1)*size], content(w*rounds+rounds-1, size)) {
				b.Errorf("the bytes of writer %d arrived changed", w)
			}
		}
	},

	"MemoryRegisteredTwiceIsTwoRegions": func(b *bench) {
		x, y := b.pairs()()
		first := b.register(y, 100)
		second, err := y.registrar.Register(first.Memory()[50:])
		b.must(err)
		b.grant(y, first, 0, 100)
		token := b.grant(y, second, 0, 50)
		first.Release()
		first.Release()
		b.must(x.WriteTo(token, 0, net.Buffers{content(1, 50)}))
		b.send(x, 1, 0, 5)
		b.expect(y, 1, 0, 5)
		b.untouched(first.Memory()[50:], content(1, 50))
		second.Release()
		if _, err := y.Grant(second, 0, 50); err == nil {
			b.Error("a region that was released is granted")
		}
	},

	"WhatIsNoPartOfARegionIsNotGranted": func(b *bench) {
		x, y := b.pairs()()
		r := b.register(y, 100)
		for _, part := range [][2]int{{-1, 10}, {0, 101}, {100, 1}, {50, -1}, {0, 0}, {1, math.MaxInt}, {math.MaxInt, 1}} {
			if _, err := y.Grant(r, part[0], part[1]); err == nil {
				b.Errorf("%d bytes from %d on of a region of 100 are granted", part[1], part[0])
			}
		}
		if _, err := y.registrar.Register(nil); err == nil {
			b.Error("memory of no bytes is registered")
		}
		b.send(x, 1, 0, 5) // the connection lives on
		b.expect(y, 1, 0, 5)
	},

	"AWriteThatIsNotGrantedEndsItsConnectionAndHarmsNothingElse": func(b *bench) {
		connect := b.pairs()
		other, otherOwner := connect()
		memory := b.register(otherOwner, 100)
		token := b.grant(otherOwner, memory, 0, 100)
		want := make([]byte, 100)
		for name, spoil := range map[string]func(owner writable, r transport.Region, t *wire.Token) (at int){
			"of another connection": func(_ writable, _ transport.Region, t *wire.Token) int { *t = token; return 0 },
			"revoked":               func(owner writable, _ transport.Region, t *wire.Token) int { owner.Revoke(*t); return 0 },
			"of a released region":  func(_ writable, r transport.Region, _ *wire.Token) int { r.Release(); return 0 },
			"beyond the part":       func(writable, transport.Region, *wire.Token) int { return 21 },
			"far beyond the part":   func(writable, transport.Region, *wire.Token) int { return math.MaxInt },
			"before the beginning":  func(writable, transport.Region, *wire.Token) int { return -1 },
			"with a greater length": func(_ writable, _ transport.Region, t *wire.Token) int { t.Length++; return 0 },
			"with another offset":   func(_ writable, _ transport.Region, t *wire.Token) int { t.Offset--; return 0 },
			"with another region":   func(_ writable, _ transport.Region, t *wire.Token) int { t.Region++; return 0 },
			"with another key":      func(_ writable, _ transport.Region, t *wire.Token) int { t.Key++; return 0 },
		} {
			x, y := connect()
			r := b.register(y, 100)
			stray := b.grant(y, r, 30, 40)
			at := spoil(y, r, &stray)
			_ = x.WriteTo(stray, at, net.Buffers{content(1, 20)}) // may have left before it is refused
			if b.lost(y); b.Failed() {
				b.Fatalf("a token %s", name)
			}
			if err := <-b.startReading(x); err == nil {
				b.Errorf("the writer by a token %s keeps its connection", name)
			}
			b.untouched(r.Memory(), make([]byte, 100))
			b.untouched(memory.Memory(), want)
		}
		b.must(other.WriteTo(token, 0, net.Buffers{content(2, 100)}))
		b.send(other, 1, 0, 5)
		b.expect(otherOwner, 1, 0, 5)
		b.untouched(memory.Memory(), content(2, 100))
	},

	"AWriteThatEndsBehindThePartChangesNothing": func(b *bench) {
		x, y := b.pairs()()
		size := 2*b.MaxBuffered + 1
		r := b.register(y, size)
		token := b.grant(y, r, 0, size-1)
		writing := make(chan error, 1)
		go func() { writing <- x.WriteTo(token, 0, net.Buffers{content(1, size)}) }()
		b.lost(y)
		<-writing
		b.untouched(r.Memory(), make([]byte, size))
	},

	// A backend that needs no reader for a write may have ended it before the release.
	"AWriteThatIsUnderWayEndsWithTheRegion": func(b *bench) {
		x, y := b.pairs()()
		size := 2*b.MaxBuffered + 1
		r := b.register(y, size)
		token := b.grant(y, r, 0, size)
		writing := make(chan error, 1)
		go func() { writing <- x.WriteTo(token, 0, net.Buffers{content(1, size)}) }()
		r.Release()
		before := bytes.Clone(r.Memory())
		lost := b.startReading(y)
		if err := <-writing; err == nil {
			b.untouched(before, content(1, size))
			return
		}
		b.wantError(<-lost, transport.ErrAccess, y.RemoteAddr().String())
		b.untouched(r.Memory(), before)
	},

	"AConnectionThatIsClosedEndsItsGrantsAndNotTheRegion": func(b *bench) {
		connect := b.pairs()
		x, y := connect()
		size := 2*b.MaxBuffered + 1
		r := b.register(y, size)
		token := b.grant(y, r, 0, size)
		writing := make(chan error, 1)
		go func() { writing <- x.WriteTo(token, 0, net.Buffers{content(1, size)}) }()
		b.must(y.Close())
		before := bytes.Clone(r.Memory())
		if err := <-writing; err == nil && !bytes.Equal(before, content(1, size)) {
			b.Error("a write to a peer that closed the connection in the middle of it succeeded")
		}
		b.untouched(r.Memory(), before)
		if _, err := y.Grant(r, 0, 10); err == nil {
			b.Error("memory is granted on a connection that was closed")
		}
		y.Revoke(token)

		x, y = connect()
		token = b.grant(y, r, 0, 10)
		b.must(x.WriteTo(token, 0, net.Buffers{content(2, 10)}))
		b.send(x, 1, 0, 5)
		b.expect(y, 1, 0, 5)
		b.untouched(r.Memory()[:10], content(2, 10))
	},
}
