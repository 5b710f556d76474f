package node

import (
	"testing"

	"github.com/paceline/paceline/transport/wire"
)

func TestARequestForAPlaceWithoutAnEnvironmentIsAnError(t *testing.T) {
	if answer, err := AskSeat(t.Context(), nil, wire.Seat{}); err == nil {
		t.Errorf("%+v", answer)
	}
}
