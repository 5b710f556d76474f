package transporttest

import (
	"net"
	"sync"

	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/wire"
)

// fillUp sends one frame of rank and number until the connection takes no more of it now, and returns the
// rest. The frame is greater than what fits between sender and reader.
func (b *bench) fillUp(c transport.Conn, rank, number int) (rest net.Buffers, size int) {
	b.Helper()
	size = b.MaxBuffered + 1
	rest, busy, err := c.TrySend(buffers(frame(rank, number, size)))
	if err != nil || busy || len(rest) == 0 {
		b.Fatalf("a frame of %d bytes left %d buffers, busy %v, error %v: more lies between sender and reader than the backend allows", size, len(rest), busy, err)
	}
	return rest, size
}

var sendTests = map[string]func(*bench){
	"ConcurrentSendersDoNotMix": func(b *bench) {
		const senders, frames = 8, 40
		x, y := b.pair()
		var wg sync.WaitGroup
		for rank := range senders {
			wg.Go(func() {
				for i := range frames {
					out := buffers(frame(rank, i, (rank*7919+i*104729)%40_000))
					if i%2 == 0 {
						rest, busy, err := x.TrySend(out)
						if err != nil {
							b.Error(err)
						}
						if out = rest; !busy && len(rest) == 0 {
							continue
						}
					}
					b.check(x.Send(out))
				}
			})
		}
		next := make([]uint64, senders)
		for range senders * frames {
			h, err := b.receive(y)
			b.must(err)
			if h.Iteration != next[h.Rank] {
				b.Fatalf("rank %d: frame %d came where %d was due", h.Rank, h.Iteration, next[h.Rank])
			}
			next[h.Rank]++
		}
		wg.Wait()
	},

	"ASlowReaderHoldsTheSenderBackAtABound": func(b *bench) {
		x, y := b.pair()
		rest, size := b.fillUp(x, 1, 0)
		var wg sync.WaitGroup
		wg.Go(func() {
			b.check(x.Send(rest))
			b.send(x, 1, 1, 10)
		})
		b.expect(y, 1, 0, size)
		b.expect(y, 1, 1, 10)
		wg.Wait()
	},

	"ARestKeepsTheConnectionForItsSender": func(b *bench) {
		x, y := b.pair()
		rest, size := b.fillUp(x, 1, 0)
		h, payload := frame(2, 0, 100)
		other := buffers(h, payload)
		left, busy, err := x.TrySend(other)
		if !busy || err != nil || len(left) == 0 || len(other[1]) != wire.HeaderSize {
			b.Errorf("a second sender: %d buffers left, busy %v, error %v", len(left), busy, err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			b.check(x.Send(other))
		})
		wg.Go(func() {
			b.check(x.Send(rest))
		})
		b.expect(y, 1, 0, size)
		b.expect(y, 2, 0, 100)
		wg.Wait()
	},

	"ARestCanBeTriedAgain": func(b *bench) {
		x, y := b.pair()
		rest, size := b.fillUp(x, 1, 0)
		rest, busy, err := x.TrySend(rest)
		if busy || err != nil || len(rest) == 0 {
			b.Errorf("trying the rest again: %d buffers left, busy %v, error %v", len(rest), busy, err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			b.check(x.Send(rest))
		})
		b.expect(y, 1, 0, size)
		wg.Wait()
	},

	"ASmallFrameNeedsNoSecondSend": func(b *bench) {
		x, y := b.pair()
		for i := range 100 {
			rest, busy, err := x.TrySend(buffers(frame(1, i, 500)))
			if busy || err != nil {
				b.Fatalf("busy %v, error %v", busy, err)
			}
			if len(rest) > 0 { // a backend may take nothing at first, such as TLS
				b.must(x.Send(rest))
			}
			b.expect(y, 1, i, 500)
		}
	},
}
