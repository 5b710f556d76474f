package worker_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// recorder is an observer that counts.
type recorder struct {
	mu                         sync.Mutex
	declared, exchanged, ended int
	failed                     []error
	bytes                      int
}

func (r *recorder) Declared(worker.Observed) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.declared++
}

func (r *recorder) Exchanged(_ worker.Observed, x worker.Exchange) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exchanged++
	r.bytes += x.Sent
}

func (r *recorder) Ended(_ worker.Observed, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended++
	r.failed = append(r.failed, err)
}

// answer has a played server give back what it is sent.
func (s *playedServer) answer() {
	go func() {
		_ = s.frames(s.conns[0], func(h wire.Header, payload []byte) {
			if h.Type == wire.TypePush {
				h.Type, h.Flags = wire.TypeResult, 0
				s.send(s.conns[0], h, slices.Clone(payload))
			}
		})
	}()
}

func TestObserversHearOfEveryOperationAndPartition(t *testing.T) {
	perform(t, 2, 1, nil, func(th *theatre) {
		for _, s := range th.servers {
			s.answer()
		}
		first, second := &recorder{}, &recorder{}
		th.engine.Observe(first)
		path := filepath.Join(t.TempDir(), "trace.json")
		if err := th.engine.StartTimeline(path); err != nil {
			th.t.Fatal(err)
		}
		for range 3 {
			if err := <-th.sum("x", 2*partBytes); err != nil {
				th.t.Fatal(err)
			}
			th.engine.Observe(second)
		}
		th.engine.Unobserve(second)
		if err := <-th.sum("x", 2*partBytes); err != nil {
			th.t.Fatal(err)
		}
		th.engine.StopTimeline()
		if first.declared != 1 || first.exchanged != 8 || first.ended != 4 || first.bytes != 8*partBytes || slices.ContainsFunc(first.failed, func(err error) bool { return err != nil }) {
			th.t.Errorf("an observer of all: %+v", first)
		}
		if second.declared != 0 || second.ended != 3 { // twice observed for the third operation
			th.t.Errorf("an observer that came later: %+v", second)
		}
		data, err := os.ReadFile(path)
		var events []map[string]any
		if err := errors.Join(err, json.Unmarshal(data, &events)); err != nil || len(events) != 2+1+8+4 {
			th.t.Errorf("the timeline has %d events, %v", len(events), err)
		}
	})
}
