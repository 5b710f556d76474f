package server

import (
	"github.com/paceline/paceline/internal/lockorder"
	"github.com/paceline/paceline/transport/outbox"
)

// replies are the frames that wait on a connection, first in, first out.
type replies struct {
	mu     lockorder.Mutex
	frames []outbox.Frame
	head   int
}

func (q *replies) push(f outbox.Frame) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.head > 0 && len(q.frames) == cap(q.frames) { // use the front again before growing
		q.frames = q.frames[:copy(q.frames, q.frames[q.head:])]
		q.head = 0
	}
	q.frames = append(q.frames, f)
}

// Pop implements outbox.Queue.
func (q *replies) Pop(limit int) (outbox.Frame, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.head == len(q.frames) || len(q.frames[q.head].Payload) > limit {
		return outbox.Frame{}, false
	}
	f := q.frames[q.head]
	q.frames[q.head] = outbox.Frame{}
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
