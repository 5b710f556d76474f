package worker_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
	"github.com/paceline/paceline/worker"
)

// overtaken is a scheduler that a removal reaches before what was declared earlier.
type overtaken struct {
	worker.Control
	asked chan struct{}
}

func (o overtaken) Declare(context.Context, []wire.Tensor) ([]wire.Placed, error) {
	<-o.asked
	return nil, errors.New("there is no such process set")
}

func (o overtaken) RemoveSet(context.Context, uint32) error {
	close(o.asked)
	time.Sleep(time.Second) // of virtual time: the declaration is answered first
	return nil
}

// A set is out of use from the call on: what is declared on it then fails for its removal, whatever the scheduler says of it.
func TestADeclarationBehindTheRemovalOfItsSetFailsForThat(t *testing.T) {
	perform(t, 1, 1, func(c *worker.Config) { c.Control = overtaken{c.Control, make(chan struct{})} }, func(th *theatre) {
		done := th.sumOf(1, "x", 8)
		th.engine.Flush(true)
		if err := th.engine.RemoveSet(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		th.wantEnd(done, worker.ErrUnsupported, `allreduce of "x" on rank 0: process set 1 [0 1] was removed while it was in flight`)
	})
}

var errBad = &control.RefusedError{Request: "declare", Reason: "one is bad"}

// choosy is a scheduler that refuses a batch for one of its tensors. It answers the first tensor when told to.
type choosy struct {
	worker.Control
	answer chan struct{}
}

func (c choosy) Declare(ctx context.Context, tensors []wire.Tensor) ([]wire.Placed, error) {
	if tensors[0].Name == "first" {
		<-c.answer
	}
	for i := range tensors {
		if tensors[i].Name == "bad" {
			return nil, errBad
		}
	}
	return c.Control.Declare(ctx, tensors)
}

func TestADeclarationThatIsRefusedFailsNoOther(t *testing.T) {
	var answer chan struct{}
	perform(t, 1, 1, func(c *worker.Config) {
		answer = make(chan struct{})
		c.Control = choosy{c.Control, answer}
	}, func(th *theatre) {
		first := th.sumOf(1, "first", 8)
		th.engine.Flush(true)
		time.Sleep(time.Second) // of virtual time: the others are declared together behind it
		bad, good := th.sumOf(1, "bad", 8), th.sumOf(1, "good", 8)
		th.engine.Flush(true)
		time.Sleep(time.Second)
		close(answer)
		th.wantEnd(bad, errBad, `"bad" could not be declared on rank 0: declare: one is bad`)
		th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "a test"})
		for _, declared := range []chan error{first, good} { // they wait for rank 1
			th.wantEnd(declared, worker.ErrPeerLost)
		}
	})
}

// kept is a scheduler that removes no set.
type kept struct{ worker.Control }

func (kept) RemoveSet(context.Context, uint32) error { return errors.New("rank 1 does not come") }

func TestASetThatCouldNotBeRemovedStaysInUse(t *testing.T) {
	perform(t, 1, 1, func(c *worker.Config) { c.Control = kept{c.Control} }, func(th *theatre) {
		if err := th.engine.RemoveSet(t.Context(), 1); err == nil {
			t.Error("it was removed")
		}
		done := th.sumOf(1, "x", 8)
		th.engine.Lost(wire.Lost{Role: wire.RoleWorker, Rank: 1, Why: "a test"})
		th.wantEnd(done, worker.ErrPeerLost)
	})
}
