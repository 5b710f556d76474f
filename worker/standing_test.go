package worker

import (
	"testing"

	"github.com/paceline/paceline/core/membership"
)

// TestAnOperationThatIsGivenUpBeginsToWaitAnew, also before its tasks have heard of that: for servers to let go of its memory. It may have waited for them just as long as the
// others' word took that it is over.
func TestAnOperationThatIsGivenUpBeginsToWaitAnew(t *testing.T) {
	o := &operation{e: new(Engine)}
	o.mu.Place(levelWorker, "operation")
	o.tasks = []*task{{o: o}}
	before, waits, _ := o.standing(nil, nil)
	o.abandoned = true
	if after, _, abandoned := o.standing(nil, nil); after == before || len(waits) != 1 || !abandoned {
		t.Errorf("%d tasks wait, with the progress %d before and %d after, given up %v", len(waits), before, after, abandoned)
	}
}

// TestServersMayJoinWhileOperationsAreLookedAt, more than the epoch had a moment ago.
func TestServersMayJoinWhileOperationsAreLookedAt(t *testing.T) {
	e := New(Config{Membership: membership.NewView(&membership.Epoch{Servers: make([]membership.Server, 1)})})
	e.setWay(1, newPeer(e, 1, membership.Server{}))
	e.look()
	e.Shutdown(t.Context())
}
