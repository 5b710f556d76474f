package worker

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/paceline/paceline/core/membership"
	"github.com/paceline/paceline/internal/inprocess"
	"github.com/paceline/paceline/internal/units"
	"github.com/paceline/paceline/transport/wire"
)

// lateServer is a server in this process that keeps requests, except those of a tensor that was cancelled after its
// announcement. Its first announcement returns after a cancel has come, and the cancel after a request has.
type lateServer struct {
	Local
	announcements     int
	known             bool
	cancelled, served chan struct{}
	gaveUp            bool
	kept              []func(wire.Header, error)
}

func (s *lateServer) Announce(*wire.Tensor) error {
	if s.announcements++; s.announcements == 1 {
		<-s.cancelled
	}
	s.known = true
	return nil
}

func (s *lateServer) Cancel(wire.Header) {
	s.gaveUp = s.known
	close(s.cancelled)
	<-s.served
}

func (s *lateServer) Serve(_ wire.Header, _, _ []byte, done func(wire.Header, error)) {
	if s.gaveUp {
		done(wire.Header{}, inprocess.ErrCancelled)
	} else {
		s.kept = append(s.kept, done)
	}
	close(s.served)
}

func (s *lateServer) Bye() {}

func (s *lateServer) Hold()    {}
func (s *lateServer) Release() {}

func TestWhatFailsWhileTheServerHereFirstHearsOfItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &lateServer{cancelled: make(chan struct{}), served: make(chan struct{})}
		members := membership.NewView(&membership.Epoch{Round: 1, Workers: make([]membership.Worker, 2), Servers: []membership.Server{{Rank: 0}}})
		e := New(Config{Membership: members, Control: &numbering{}, PartitionBytes: 1 << 20, DeclareTimeout: time.Minute, Log: zap.NewNop()})
		if err := e.Start(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		b := make([]byte, 3*inlineMax) // more than the submitting goroutine hands over itself
		op := Op{
			Kind: units.Allreduce, DType: units.Uint8, ReduceOp: units.Sum, Set: wire.ProcessSet{Ranks: []int{0, 1}}, Shape: []int64{int64(len(b))},
			Input: b, Output: b, Prescale: 1, Postscale: 1, Name: "x", Done: func(_ Output, err error) { done <- err },
		}
		if err := e.Submit([]Op{op}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // its tensor is being announced
		e.Failed(wire.Failure{Code: units.FailMismatch, Name: "x", Text: "ranks disagree"})
		synctest.Wait()
		select {
		case err := <-done:
			if !errors.Is(err, ErrMismatch) {
				t.Error(err)
			}
		default:
			t.Error("it does not end")
		}
		for _, done := range s.kept {
			done(wire.Header{}, inprocess.ErrCancelled)
		}
		e.Shutdown(t.Context())
	})
}
