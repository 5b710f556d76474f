package worker

import (
	"sync"
	"testing"
)

// TestTimelinesThatReplaceEachOtherAreAllEnded: an observer that nobody can find any more would cost time until the end.
func TestTimelinesThatReplaceEachOtherAreAllEnded(t *testing.T) {
	e := &Engine{}
	var starts sync.WaitGroup
	for range 8 {
		starts.Go(func() {
			for range 200 {
				e.replaceTimeline(&timeline{})
			}
		})
	}
	starts.Wait()
	e.StopTimeline()
	if n := len(e.observers.all()); n > 0 {
		t.Errorf("%d timelines still observe", n)
	}
}
