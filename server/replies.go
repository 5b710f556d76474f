package server

import (
	"math"
	"slices"

	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/wire"
)

// replies are the frames that wait on a connection, first in, first out, but that an urgent result passes others. Nothing passes a frame
// that is no result, as what follows may rest on it; only windows do, which bring credit.
type replies struct {
	mu     lockorder.Mutex
	frames []reply
	head   int
}

type reply struct {
	outbox.Frame
	priority int
}

func (q *replies) push(r reply) {
	if r.Type == wire.TypeWindow {
		r.priority = math.MaxInt
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.head > 0 && len(q.frames) == cap(q.frames) { // use the front again before growing
		q.frames = q.frames[:copy(q.frames, q.frames[q.head:])]
		q.head = 0
	}
	at := len(q.frames)
	for at > q.head && r.passes(&q.frames[at-1]) {
		at--
	}
	q.frames = slices.Insert(q.frames, at, r)
}

func (r *reply) passes(before *reply) bool {
	return r.priority > before.priority && r.moves() && before.moves()
}

func (r *reply) moves() bool { return r.Type == wire.TypeResult || r.Type == wire.TypeWindow }

// Pop implements outbox.Queue.
func (q *replies) Pop(limit int) (outbox.Frame, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.head == len(q.frames) || len(q.frames[q.head].Payload) > limit {
		return outbox.Frame{}, false
	}
	f := q.frames[q.head].Frame
	q.frames[q.head] = reply{}
	if q.head++; q.head == len(q.frames) {
		q.frames, q.head = q.frames[:0], 0
	}
	return f, true
}

// Waiting implements outbox.Queue.
func (q *replies) Waiting() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.head < len(q.frames)
}
