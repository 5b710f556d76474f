package worker_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/paceline/paceline/internal/trace"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// recorder is an observer that counts.
type recorder struct {
	mu                         sync.Mutex
	declared, exchanged, ended int
	failed                     []error
	bytes                      int
	disordered                 []worker.Times
}

func (r *recorder) Ended(o worker.Observed, exchanges []worker.Exchange, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended++
	if !o.Declared.IsZero() {
		r.declared++
	}
	for _, x := range exchanges {
		r.exchanged++
		r.bytes += x.Sent
		if t := x.Times; t.Queued.IsZero() || t.Moved.Before(t.Queued) || t.Arrived.Before(t.Moved) || t.Received.Before(t.Arrived) || t.Answered.Before(t.Received) {
			r.disordered = append(r.disordered, t)
		}
	}
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

// checkTimeline checks a timeline by the rules of its format, and counts slices by name.
func (th *theatre) checkTimeline(path string, want map[string]int) {
	th.t.Helper()
	f, err := os.Open(path)
	if err != nil {
		th.t.Fatal(err)
	}
	defer f.Close()
	events, cut, err := trace.Read(f)
	if err = errors.Join(err, trace.Check(events)); err != nil || cut {
		th.t.Fatal(cut, err)
	}
	got := map[string]int{}
	for _, e := range events {
		if e.Phase == trace.Slice {
			got[e.Name]++
		}
	}
	for name, n := range want {
		if got[name] != n {
			th.t.Errorf("%d slices %q in the timeline, want %d; all: %v", got[name], name, n, got)
		}
	}
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
		if len(first.disordered) > 0 {
			th.t.Errorf("events of an exchange out of order: %+v", first.disordered)
		}
		th.checkTimeline(path, map[string]int{"allreduce": 4, "declare": 1, "push 0": 4, "push 1": 4})
	})
}
