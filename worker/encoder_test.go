package worker

import (
	"slices"
	"testing"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/mempool"
)

// The most urgent task is encoded first, for any server. A task for a server with enough messages to send waits until
// one of them has left, and does not delay the tasks behind it.
func TestTheMostUrgentTaskOfAServerThatIsNotAheadIsEncodedFirst(t *testing.T) {
	e := &Engine{}
	e.cfg.Membership = membership.NewView(&membership.Epoch{Servers: make([]membership.Server, 2)})
	e.book = newBook(&e.cfg)
	n := newEncoder(e)
	n.pool = mempool.New(2 * encodeAhead)
	for i, priority := range []int{1, 5, 3, 5} {
		n.lanes[i%2].queue.push(&task{o: &operation{Op: Op{Priority: priority}}, server: i % 2})
	}
	var order []int
	next := func() {
		if t := n.lanes.next(); t != nil {
			order = append(order, t.server*10+t.o.Priority)
		}
	}
	next()
	message, err := n.pool.Get(encodeAhead)
	if err != nil {
		t.Fatal(err)
	}
	ahead := &task{server: 1, message: message}
	n.made(ahead)
	next() // server 1 has enough to send
	n.sent(ahead)
	next()
	next()
	next()
	if want := []int{15, 3, 15, 1}; !slices.Equal(order, want) {
		t.Fatalf("servers and priorities %v, want %v", order, want)
	}
	if n.lanes[1].ahead != 0 || n.pool.Lent() != 0 {
		t.Fatalf("%d bytes are ahead and %d lent", n.lanes[1].ahead, n.pool.Lent())
	}
}
