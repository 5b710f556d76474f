package sim

import "time"

// event is a scheduled event.
type event struct {
	at   time.Duration
	seq  uint64 // events of one time happen in the order of scheduling
	rank int32
	key  int32 // of begin and computed none; of stop the superstep
	kind eventKind
}

func (e *event) before(f *event) bool { return e.at < f.at || e.at == f.at && e.seq < f.seq }

// queue is a heap of events with four children to a node, which halves its depth: at millions of
// events a run spends most of its time on the path down.
type queue struct {
	heap []event
	seq  uint64
}

func (q *queue) len() int { return len(q.heap) }

func (q *queue) add(at time.Duration, kind eventKind, rank, key int) {
	q.seq++
	e := event{at: at, seq: q.seq, kind: kind, rank: int32(rank), key: int32(key)}
	q.heap = append(q.heap, e)
	k := len(q.heap) - 1
	for k > 0 {
		parent := (k - 1) / 4
		if !e.before(&q.heap[parent]) {
			break
		}
		q.heap[k] = q.heap[parent]
		k = parent
	}
	q.heap[k] = e
}

// next removes the first event. The queue must not be empty.
func (q *queue) next() event {
	first, last := q.heap[0], q.heap[len(q.heap)-1]
	q.heap = q.heap[:len(q.heap)-1]
	n := len(q.heap)
	if n == 0 {
		return first
	}
	k := 0
	for {
		least := 4*k + 1
		if least >= n {
			break
		}
		for c := least + 1; c < min(4*k+5, n); c++ {
			if q.heap[c].before(&q.heap[least]) {
				least = c
			}
		}
		if !q.heap[least].before(&last) {
			break
		}
		q.heap[k] = q.heap[least]
		k = least
	}
	q.heap[k] = last
	return first
}
