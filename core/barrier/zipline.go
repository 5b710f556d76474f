// Package barrier finds when ElasticBSP's next barrier falls (its paper's sections 3 and 5): it predicts
// the ends of the workers' next iterations from their durations, and chooses one end of each worker such that
// these lie closest together. It is pure: no clock, no I/O.
package barrier

import (
	"math"
	"slices"
	"sort"
	"time"
)

// Choice is a window that contains an end of each worker.
type Choice struct {
	At   time.Duration // where it closes: the time of the barrier
	Wait time.Duration // its width: how long the first worker waits there
}

// Search finds the choice of least wait. It reuses its memory; the zero value is ready. It is not safe for concurrent use.
type Search struct {
	merge merge
	line  line
}

// ZipLine is the narrowest window that contains an end of each row, and of equally narrow ones the earliest.
// Row w holds worker w's ends in rising order. Without workers, or if one has no ends, there is none.
//
// It is the paper's algorithm 2: a scan of all ends in order keeps the newest of each worker, and a window
// opens at the oldest of these. A merge of the rows orders the ends, in O(log n) each. A list orders the workers
// by their newest ends: a worker moves to the back at its next end, in O(1), and the window opens at the front.
// So a search takes O(Rn log n), as the paper's ZipLineOptBS, with smaller constants.
func (s *Search) ZipLine(ends [][]time.Duration) (Choice, bool) {
	if len(ends) == 0 || slices.ContainsFunc(ends, func(row []time.Duration) bool { return len(row) == 0 }) {
		return Choice{}, false
	}
	s.merge.start(ends)
	s.line.start(len(ends))
	best := Choice{Wait: math.MaxInt64}
	for {
		at, worker, last := s.merge.next()
		s.line.back(worker, at, last)
		front := s.line.front()
		if s.line.missing > 0 {
			continue
		}
		if wait := at - front.at; wait < best.Wait {
			best = Choice{At: at, Wait: wait}
		}
		if front.last {
			return best, true // the front stays, so windows only grow from here on
		}
	}
}

// Index is the index in a worker's row of the end inside the window c.
func (c Choice) Index(row []time.Duration) int {
	return sort.Search(len(row), func(i int) bool { return row[i] > c.At }) - 1
}

// merge brings the ends of all rows in order. It is a tournament: node k of the tree holds the loser
// there, and row w enters below node (w+n)/2.
type merge struct {
	ends [][]time.Duration
	tree []head
	best head // the winner: the earliest remaining end
}

// head is the first remaining end of a row.
type head struct {
	at time.Duration
	id int64
}

// never is the head of an exhausted row.
const never = time.Duration(math.MaxInt64)

func (m *merge) start(ends [][]time.Duration) {
	n := len(ends)
	m.ends = ends
	m.tree = slices.Grow(m.tree[:0], n)[:n]
	for k := range m.tree {
		m.tree[k] = head{at: -never} // wins until the second row arrives
	}
	for w := n - 1; w >= 0; w-- {
		m.play(head{at: ends[w][0], id: int64(w) << 32})
	}
}

// play moves a row's head up the tree against the losers there. It compiles without branches, half of which
// would be mispredicted: that halves the time of a search.
func (m *merge) play(h head) {
	at, id := h.at, h.id
	for k := (uint(id>>32) + uint(len(m.tree))) / 2; k > 0; k /= 2 {
		node := &m.tree[k]
		winner, loser := id, node.id
		if node.at < at {
			winner, loser = loser, winner
		}
		at, node.at = min(at, node.at), max(at, node.at)
		id, node.id = winner, loser
	}
	m.best = head{at, id}
}

// next removes the earliest end; last reports whether it is its row's last.
func (m *merge) next() (at time.Duration, worker int32, last bool) {
	h := m.best
	at, worker = h.at, int32(h.id>>32)
	row := m.ends[worker]
	if h.id++; int(int32(h.id)) < len(row) {
		h.at = row[int32(h.id)]
	} else {
		h.at, last = never, true
	}
	m.play(h)
	return at, worker, last
}

// line is the workers in the order of their newest ends: a ring around an anchor behind the last one.
type line struct {
	places  []place
	missing int // workers not in it yet
}

type place struct {
	at         time.Duration
	prev, next int32
	in, last   bool // last: this worker has no later end
}

func (l *line) start(workers int) {
	l.places = slices.Grow(l.places[:0], workers+1)[:workers+1]
	clear(l.places)
	anchor := int32(workers)
	l.places[anchor] = place{prev: anchor, next: anchor}
	l.missing = workers
}

func (l *line) front() *place { return &l.places[l.places[len(l.places)-1].next] }

// back moves or adds a worker to the back.
func (l *line) back(worker int32, at time.Duration, last bool) {
	anchor := int32(len(l.places) - 1)
	p := &l.places[worker]
	if p.in {
		l.places[p.prev].next = p.next
		l.places[p.next].prev = p.prev
	} else {
		l.missing--
	}
	behind := l.places[anchor].prev
	*p = place{at: at, prev: behind, next: anchor, in: true, last: last}
	l.places[behind].next = worker
	l.places[anchor].prev = worker
}
