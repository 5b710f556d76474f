package bench

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestASignalEndsAMeasurementOfScale(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	signal := errors.New("a signal")
	cancel(signal)
	if _, err := (&crowd{}).row(ctx, 4, 1, time.Hour); !errors.Is(err, signal) {
		t.Fatal(err)
	}
}
