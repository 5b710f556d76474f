package worker

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/paceline/paceline/core/membership"
)

// heldSum is an operation of so many bytes that may be held.
func heldSum(bytes int) *operation { return &operation{Op: Op{Input: make([]byte, bytes)}} }

func TestSumsAreHeldWhileOthersAreUnderWay(t *testing.T) {
	var g gather
	first, second, third := heldSum(4), heldSum(4), heldSum(4)
	g.add(first)
	if ops := g.due(); len(ops) != 1 || g.state() != (Gathering{Bytes: gatherBytes}) {
		t.Fatalf("%d operations leave while nothing is under way, and then %+v", len(ops), g.state())
	}
	g.add(second)
	g.add(third)
	if ops := g.due(); len(ops) != 0 || !g.state().Held {
		t.Fatalf("%d operations leave beside one that is under way, and then %+v", len(ops), g.state())
	}
	g.ended(first)
	if ops := g.due(); len(ops) != 2 || ops[0] != second || ops[1] != third {
		t.Fatalf("%d operations leave with the answer, want both that were held", len(ops))
	}
	g.ended(second)
	g.ended(third)
	if g.state() != (Gathering{}) {
		t.Errorf("%+v at the end", g.state())
	}
}

func TestALargeBatchLeaves(t *testing.T) {
	for _, crowded := range []bool{false, true} {
		g := gather{crowded: crowded, underWay: 1}
		g.add(heldSum(g.most() - 1))
		if ops := g.due(); len(ops) != 0 {
			t.Errorf("crowded %v: %d operations leave below the limit", crowded, len(ops))
		}
		g.add(heldSum(1))
		if ops := g.due(); len(ops) != 2 {
			t.Errorf("crowded %v: %d operations leave at the limit, want 2", crowded, len(ops))
		}
	}
}

func TestACrowdedJobHoldsWhatSomebodyWillWaitFor(t *testing.T) {
	g := gather{crowded: true}
	g.add(heldSum(4))
	if ops := g.due(); len(ops) != 0 || g.state() != (Gathering{Bytes: crowdedBytes, Held: true}) {
		t.Fatalf("%d operations leave, and then %+v", len(ops), g.state())
	}
	unwaited := heldSum(4)
	unwaited.Unwaited = true
	g.add(unwaited)
	if ops := g.due(); len(ops) != 2 {
		t.Fatalf("%d operations leave with one that nobody waits for, want 2", len(ops))
	}
}

func TestAnOperationThatIsAwaitedTakesAllThatIsHeldWithIt(t *testing.T) {
	for _, crowded := range []bool{false, true} {
		g := gather{crowded: crowded, underWay: 1}
		g.add(heldSum(4))
		awaited := heldSum(4)
		awaited.AtOnce = true
		g.add(awaited)
		if ops := g.due(); len(ops) != 2 {
			t.Errorf("crowded %v: %d operations leave, want 2", crowded, len(ops))
		}
		g.add(heldSum(4))
		if ops := g.due(); len(ops) != 0 {
			t.Errorf("crowded %v: %d operations leave that nobody waits for yet", crowded, len(ops))
		}
	}
}

// A program may wait for its operations by other means than Flush.
func TestWhatIsHeldLeavesInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reports []Gathering
		view := membership.NewView(&membership.Epoch{})
		e := New(Config{Membership: view, Crowded: true, Gathering: func(g Gathering) { reports = append(reports, g) }})
		defer e.end(ErrShutdown)
		o := heldSum(4)
		o.e, o.err = e, ErrInvalid // which ends it when it is launched
		ended := time.Duration(0)
		start := time.Now()
		o.n = e.nameOf(nameID{})
		o.Done = func(Output, error) { ended = time.Since(start) }
		e.mu.Lock()
		e.untold.Add(1)
		e.gather.add(o)
		e.holding()
		e.mu.Unlock()
		time.Sleep(3 * gatherFor)
		synctest.Wait()
		if ended < gatherFor/2 || ended > 2*gatherFor {
			t.Errorf("it left after %v, want about %v", ended, gatherFor)
		}
		if want := (Gathering{Bytes: crowdedBytes}); len(reports) != 3 || !reports[1].Held || reports[2] != want {
			t.Errorf("reports %+v, want at last %+v", reports, want)
		}
	})
}
