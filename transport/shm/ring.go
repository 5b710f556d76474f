package shm

import (
	"errors"
	"fmt"
	"net"
	"sync/atomic"

	"github.com/paceline/paceline/transport/stream"
)

// errRing is wrapped by the error that ends a connection whose peer wrote counters that no ring can have.
var errRing = errors.New("the peer broke the rules of the shared memory")

// stride is after how many bytes a sender publishes and a reader frees what it has copied, so that both copy at the same time.
const stride = 64 << 10

// ring is one direction of a connection. Its counters only grow; the place of a byte is its number modulo the size.
//
//  1. The sender alone writes published and its bytes, before it publishes them; the reader alone writes consumed.
//  2. Each end counts its own side in its own memory, and believes the peer's counter only within the size of the ring.
//  3. Whoever waits stores the value of the peer's counter that it waits for, then looks once more. Whoever advances a
//     counter looks for that value afterwards. One of the two sees the other, so no doorbell is missed.
//
// A peer that dies in the middle of a copy has not published it.
type ring struct {
	data     []byte
	counters [numCounters]*atomic.Uint64
}

// between is how many bytes lie between two counters, of which the peer writes one.
func (r *ring) between(ahead, behind uint64) (int, error) {
	n := ahead - behind
	if n > uint64(len(r.data)) {
		return 0, fmt.Errorf("%w: %d bytes lie in a ring of %d", errRing, n, len(r.data))
	}
	acquired()
	return int(n), nil
}

// advance stores a counter of this end, and rings for the peer if it waits for no more than that.
func (r *ring) advance(counter int, to uint64, asked int, peer bell) {
	released()
	r.counters[counter].Store(to)
	if at := r.counters[asked].Load(); at != 0 && to >= at && r.counters[asked].CompareAndSwap(at, 0) {
		peer.ring()
	}
}

// sender is the end of a ring that sends.
type sender struct {
	ring
	head   uint64 // published, as it should be
	reader bell   // of the peer
}

// room is how many bytes can be put in.
func (s *sender) room() (int, error) {
	used, err := s.between(s.head, s.counters[consumed].Load())
	return len(s.data) - used, err
}

// put copies in what has room, and returns how many bytes it took.
func (s *sender) put(buffers net.Buffers) (taken int, err error) {
	room, unpublished := 0, 0
	for _, b := range buffers {
		for len(b) > 0 {
			if room == 0 {
				s.publish(unpublished)
				unpublished = 0
				if room, err = s.room(); room == 0 || err != nil {
					return taken, err
				}
			}
			at := int(s.head+uint64(unpublished)) & (len(s.data) - 1)
			n := copy(s.data[at:], b[:min(len(b), room, stride)])
			b, room, taken = b[n:], room-n, taken+n
			if unpublished += n; unpublished >= stride {
				s.publish(unpublished)
				unpublished = 0
			}
		}
	}
	s.publish(unpublished)
	return taken, nil
}

func (s *sender) publish(n int) {
	if n > 0 {
		s.head += uint64(n)
		s.advance(published, s.head, wanted, s.reader)
	}
}

// ask asks for the doorbell when half of the ring is free, and reports whether it is.
func (s *sender) ask() (free bool) {
	s.counters[awaited].Store(s.head - uint64(len(s.data)/2))
	if room, err := s.room(); err == nil && room < len(s.data)/2 {
		return false
	}
	s.counters[awaited].Store(0)
	return true
}

// receiver is the end of a ring that reads.
type receiver struct {
	ring
	tail   uint64 // consumed, as it should be
	want   int    // bytes that are waited for
	sender bell   // of the peer
}

// ready is how many bytes can be read.
func (r *receiver) ready() (int, error) {
	return r.between(r.counters[published].Load(), r.tail)
}

// get copies out what is there.
func (r *receiver) get(b []byte) (taken int, err error) {
	ready := 0
	for len(b) > 0 {
		if ready == 0 {
			if ready, err = r.ready(); ready == 0 || err != nil {
				return taken, err
			}
		}
		at := int(r.tail) & (len(r.data) - 1)
		n := copy(b[:min(len(b), ready, stride)], r.data[at:])
		b, ready, taken = b[n:], ready-n, taken+n
		r.tail += uint64(n)
		r.advance(consumed, r.tail, awaited, r.sender)
	}
	return taken, nil
}

// need says how many bytes a read waits for: all of a payload that surely comes (stream.ReadAhead), or half of the ring.
func (r *receiver) need(b []byte) {
	if r.want = 1; len(b) > stream.ReadAhead {
		r.want = min(len(b), len(r.data)/2)
	}
}

// ask asks for the doorbell when as much is there as is waited for, and reports whether it is.
func (r *receiver) ask() (there bool) {
	r.counters[wanted].Store(r.tail + uint64(r.want))
	if ready, err := r.ready(); err == nil && ready < r.want {
		return false
	}
	r.counters[wanted].Store(0)
	return true
}
