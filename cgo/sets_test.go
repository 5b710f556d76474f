package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/worker"
)

// The scheduler refuses a call that waits for a lost rank right after it has told of the loss: which of the two a waiting call
// hears first is left to chance, and its error is of the loss either way.
func TestACallOnProcessSetsEndsWithTheLossThatEndedIt(t *testing.T) {
	loss := fmt.Errorf("%w: worker 1 is gone: it was killed", worker.ErrPeerLost)
	refused := &control.RefusedError{Request: "add process set [0 1]", Reason: "rank 1 was lost", Missed: true}
	wrong := &control.RefusedError{Request: "add process set [9]", Reason: "there is no rank 9"}
	for _, one := range []struct {
		name   string
		broken error
		err    error
		kind   error
		says   string
	}{
		{"answered", nil, nil, nil, ""},
		{"given up with the engine", loss, context.Canceled, worker.ErrPeerLost, "worker 1 is gone"},
		{"refused for the loss", loss, refused, worker.ErrPeerLost, "worker 1 is gone"},
		{"refused for a rank that left", nil, refused, worker.ErrStall, "rank 1 was lost"},
		{"not answered in time", nil, context.DeadlineExceeded, worker.ErrStall, "on rank 2"},
		{"wrong ranks", nil, wrong, worker.ErrInvalid, "there is no rank 9"},
		{"wrong ranks, and then a loss", loss, wrong, worker.ErrInvalid, "there is no rank 9"},
	} {
		err := setsError(2, one.broken, one.err)
		if !errors.Is(err, one.kind) || err != nil && !strings.Contains(err.Error(), one.says) {
			t.Errorf("%s: %v, want %v that says %q", one.name, err, one.kind, one.says)
		}
	}
}
