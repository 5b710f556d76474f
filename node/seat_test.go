package node_test

import (
	"testing"

	"github.com/paceline/paceline/node"
	"github.com/paceline/paceline/transport/wire"
)

func TestARequestForAPlaceWithoutAnEnvironmentIsAnError(t *testing.T) {
	if answer, err := node.AskSeat(t.Context(), nil, wire.Seat{}); err == nil {
		t.Errorf("%+v", answer)
	}
}
