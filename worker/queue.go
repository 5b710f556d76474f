package worker

import "container/heap"

// taskQueue orders tasks by priority, the highest first, and among equals by their coming. Tasks that
// were abandoned while they waited are passed over.
type taskQueue struct {
	tasks taskHeap
	order uint64
}

func (q *taskQueue) push(t *task) {
	q.order++
	t.order = q.order
	t.state = taskQueued
	heap.Push(&q.tasks, t)
}

// peek is the next task, nil if there is none.
func (q *taskQueue) peek() *task {
	for len(q.tasks) > 0 {
		if t := q.tasks[0]; t.state == taskQueued {
			return t
		}
		heap.Pop(&q.tasks)
	}
	return nil
}

// pop takes the task that peek gave.
func (q *taskQueue) pop() *task {
	t := heap.Pop(&q.tasks).(*task)
	t.state = taskMoving
	return t
}

// before reports whether t is to go before u, which is in another queue; either may be nil.
func (t *task) before(u *task) bool {
	return t != nil && (u == nil || t.o.Priority > u.o.Priority)
}

type taskHeap []*task

func (h taskHeap) Len() int { return len(h) }
func (h taskHeap) Less(i, j int) bool {
	if a, b := h[i].o.Priority, h[j].o.Priority; a != b {
		return a > b
	}
	return h[i].order < h[j].order
}
func (h taskHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *taskHeap) Push(x any)   { *h = append(*h, x.(*task)) }
func (h *taskHeap) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return t
}
