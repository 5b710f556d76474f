package worker

import (
	"container/heap"

	life "github.com/paceline/paceline/core/task"
)

// taskQueue orders tasks by priority, the highest first, and among equals by their coming. Tasks that
// were abandoned while they waited are passed over.
type taskQueue struct {
	tasks taskHeap
	order uint64
}

func (q *taskQueue) push(t *task) {
	q.order++
	t.order = q.order
	heap.Push(&q.tasks, t)
}

// peek is the next task, nil if there is none.
func (q *taskQueue) peek() *task {
	for len(q.tasks) > 0 && q.tasks[0].abandoned() {
		heap.Pop(&q.tasks)
	}
	if len(q.tasks) == 0 {
		return nil
	}
	return q.tasks[0]
}

// pop removes the task that peek returned, and reports whether it may begin what is said.
func (q *taskQueue) pop(begins life.Event) bool { return heap.Pop(&q.tasks).(*task).begin(begins) }

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
