package worker

import (
	"path/filepath"
	"sync"
	"testing"
)

// TestTimelinesThatReplaceEachOtherAreAllEnded: an observer without a reference would cost time until the end of the job.
func TestTimelinesThatReplaceEachOtherAreAllEnded(t *testing.T) {
	e := &Engine{cfg: Config{Control: new(numbering)}}
	path := filepath.Join(t.TempDir(), "trace.json")
	var starts sync.WaitGroup
	for range 8 {
		starts.Go(func() {
			for range 50 {
				if err := e.StartTimeline(path); err != nil {
					t.Error(err)
				}
			}
		})
	}
	starts.Wait()
	e.StopTimeline()
	if n := len(e.observers.all()); n > 0 {
		t.Errorf("%d timelines still observe", n)
	}
}
