package worker

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	life "github.com/paceline/paceline/core/task"
	"github.com/paceline/paceline/internal/limits"
	"github.com/paceline/paceline/internal/mempool"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/outbox"
	"github.com/paceline/paceline/transport/shm"
	"github.com/paceline/paceline/transport/wire"
)

// sending is traffic over connections; the test decides what leaves and what is consumed.
type sending struct {
	traffic
	e *Engine
}

func newSending(credit int64, conns int) *sending {
	s := &sending{traffic: traffic{credit: credit, answers: map[answerID]*task{}}, e: &Engine{}}
	s.e.setWay(0, &peer{})
	for range conns {
		s.open()
	}
	return s
}

// queued adds a task that pushes bytes of a tensor.
func (s *sending) queued(t *testing.T, kind units.Kind, priority, tensor, bytes int) *task {
	t.Helper()
	o := &operation{Op: Op{Kind: kind, Priority: priority}, e: s.e, d: &declaration{t: wire.Tensor{ID: uint32(tensor)}}}
	k := &task{o: o, h: wire.Header{Type: wire.TypePush, Tensor: uint32(tensor)}, in: make([]byte, bytes), answer: true}
	k.start()
	if err := s.add(k); err != nil {
		t.Fatal(err)
	}
	return k
}

// leaves pops all frames that a connection may send, as text: "announce 1", "push 1".
func (s *sending) leaves(conn, limit int) string {
	var names []string
	for f, _, ok := s.next(s.conns[conn], limit); ok; f, _, ok = s.next(s.conns[conn], limit) {
		names = append(names, fmt.Sprint(f.Type, " ", f.Tensor))
	}
	return strings.Join(names, ", ")
}

func TestTheMostUrgentTaskLeavesFirstBehindItsAnnouncement(t *testing.T) {
	s := newSending(1<<20, 2)
	for i, priority := range []int{1, 3, 2, 3} {
		s.queued(t, units.Allreduce, priority, 10+i, 100)
	}
	abandoned := s.queued(t, units.Allreduce, 9, 20, 100)
	abandoned.step(life.Abandon)
	big := s.queued(t, units.Allreduce, 0, 30, 1000)
	s.conns[0].control = append(s.conns[0].control, outbox.Frame{Header: wire.Header{Type: wire.TypeCancel, Tensor: 1}})
	if got, want := s.leaves(0, 999), "cancel 1, announce 11, push 11, announce 13, push 13, announce 12, push 12, announce 10, push 10"; got != want {
		t.Errorf("left: %s\nwant: %s", got, want)
	}
	if !s.waiting(s.conns[1]) {
		t.Error("nothing waits, though a large task does")
	}
	if got, want := s.leaves(1, 1000), "announce 30, push 30"; got != want {
		t.Errorf("left: %s, want: %s", got, want)
	}
	for i, want := range []*task{big, nil} {
		if got, _ := s.answered(&big.h); got != want {
			t.Errorf("answer %d belongs to %v, want %v", i, got, want)
		}
	}
	if got, _ := s.answered(&abandoned.h); got != nil {
		t.Error("an answer that nobody waits for belongs to a task")
	}
}

func TestTasksOfOnePartitionOfAHeldValueTakeOneConnection(t *testing.T) {
	s := newSending(1<<20, 3)
	for range 4 {
		s.queued(t, units.Accumulate, 0, 7, 1)
	}
	if got, want := s.leaves(0, 999)+s.leaves(2, 999)+s.leaves(1, 999), "announce 7, push 7, push 7, push 7, push 7"; got != want {
		t.Errorf("left: %s, want: %s", got, want)
	}
}

// In an elastic job what a residual may go ahead of takes the connection on which that is brought to an heir, too.
func TestPushesAndStatesOfOneResidualTakeOneConnection(t *testing.T) {
	s := newSending(1<<20, 3)
	s.elastic, s.kept = true, new(kept)
	o := &operation{e: s.e, d: &declaration{t: wire.Tensor{ID: 7}, coding: &coding{}}}
	for _, typ := range []wire.Type{wire.TypePush, wire.TypeState} {
		k := &task{o: o, h: wire.Header{Type: typ, Tensor: 7}, answer: true}
		k.start()
		if err := s.add(k); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := s.leaves(0, 999)+s.leaves(2, 999)+s.leaves(1, 999), "announce 7, push 7, state 7"; got != want {
		t.Errorf("left: %s, want: %s", got, want)
	}
}

// A server that has left accepts nothing more, and all tasks for it are listed.
func TestAServerThatIsGone(t *testing.T) {
	s := newSending(250, 2)
	var want []*task
	for i := range 4 {
		want = append(want, s.queued(t, []units.Kind{units.Allreduce, units.Accumulate}[i%2], 0, i, 100))
	}
	s.leaves(0, 999)
	s.unsent = append(s.unsent, want[0])
	for _, k := range s.tasks() {
		want = slices.DeleteFunc(want, func(w *task) bool { return w == k })
	}
	if len(want) > 0 {
		t.Errorf("%d tasks are forgotten", len(want))
	}
	s.gone = ErrUnsupported
	k := &task{o: &operation{e: s.e}}
	if err := s.add(k); err == nil {
		t.Error("a task is queued for a server that has left")
	}
	if k.step(life.Abandon); s.add(k) != nil {
		t.Error("an abandoned task has another error")
	}
}

// TestATaskWaitsForTheHeirWhereTheConnectionsHaveEnded: a sender that took it now might not have said that it failed before the heir is found, and then nobody sends it.
func TestATaskWaitsForTheHeirWhereTheConnectionsHaveEnded(t *testing.T) {
	s := newSending(1<<20, 1)
	s.elastic, s.ended = true, true
	waits := s.queued(t, units.Allreduce, 0, 1, 100)
	if s.waiting(s.conns[0]) {
		t.Error("a task waits for a connection that has ended")
	}
	s.conns[0].control = append(s.conns[0].control, outbox.Frame{Header: wire.Header{Type: wire.TypeBye}})
	if got := s.leaves(0, 1000); got != "bye 0" {
		t.Errorf("left: %s, want only what is refused without harm", got)
	}
	if left := s.empty(); len(left) != 1 || left[0] != waits {
		t.Errorf("%d tasks are left for the heir, want 1", len(left))
	}
}

// TestWhatIsLentTakesCredit: an urgent task never waits behind more than that, whether tensors travel or only where they lie.
func TestWhatIsLentTakesCredit(t *testing.T) {
	const bytes = 64 << 10
	arena, err := shm.NewArena()
	if err != nil {
		t.Fatal(err)
	}
	for _, placed := range []bool{false, true} {
		s := newSending(2*bytes, 1)
		s.arena, s.staging, s.stages = arena, mempool.New(limits.MaxStaged), map[answerID]*stage{}
		s.staging.Make = arena.Alloc
		for tensor := range 4 {
			k := s.queued(t, units.Allreduce, 0, tensor, bytes)
			if placed {
				k.placed, k.out, k.in = true, k.in, k.place[:]
			}
		}
		if got, want := s.leaves(0, bytes), "announce 0, push 0, announce 1, push 1"; got != want {
			t.Errorf("left: %s, want: %s", got, want)
		}
		s.queued(t, units.Allreduce, 1, 9, 100)
		s.consumed(s.conns[0], bytes)
		if got, want := s.leaves(0, bytes), "announce 9, push 9, announce 2, push 2"; got != want {
			t.Errorf("left: %s, want: %s", got, want)
		}
		if travelled := s.conns[0].travelled; travelled != 3*wire.PlaceSize+100 {
			t.Errorf("%d bytes travelled of what is lent", travelled)
		}
	}
}

// TestCreditUnderRandomSchedules has tasks queued, sent, abandoned and consumed in random order. Bytes in flight are those
// sent and not consumed; they exceed the credit by one task at most, and in the end everything is sent.
func TestCreditUnderRandomSchedules(t *testing.T) {
	const credit, most = 1000, 400
	for seed := range uint64(500) {
		random := rand.New(rand.NewPCG(seed, 0))
		s := newSending(credit, 1+random.IntN(3))
		consumed := make([]uint64, len(s.conns))
		var queued []*task
		for range 200 {
			c := random.IntN(len(s.conns))
			switch random.IntN(4) {
			case 0:
				queued = append(queued, s.queued(t, units.Allreduce, random.IntN(3), len(queued), 1+random.IntN(most)))
			case 1:
				s.next(s.conns[c], most)
			case 2:
				consumed[c] = min(consumed[c]+uint64(random.IntN(2*most)), s.conns[c].sent)
				s.consumed(s.conns[c], consumed[c])
				s.consumed(s.conns[c], s.conns[c].sent+1) // a wrong report has no effect
			case 3:
				if len(queued) > 0 && random.IntN(3) == 0 {
					k := queued[random.IntN(len(queued))]
					k.step(life.Abandon)
					s.forget(k)
				}
			}
			under := int64(0)
			for i, c := range s.conns {
				under += int64(c.sent - consumed[i])
			}
			if under != s.inFlight || under >= credit+most {
				t.Fatalf("seed %d: %d bytes are under way, %d counted, of a credit of %d", seed, under, s.inFlight, credit)
			}
		}
		for s.waiting(s.conns[0]) || s.inFlight >= credit {
			for i, c := range s.conns {
				s.leaves(i, 999)
				s.consumed(c, c.sent)
			}
		}
		for _, k := range queued {
			if k.begin(life.Move) {
				t.Fatalf("seed %d: a task has not left", seed)
			}
		}
	}
}
