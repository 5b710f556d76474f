package node

import (
	"context"
	"maps"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport/control"
	"github.com/paceline/paceline/transport/wire"
)

// AskSeat asks the launcher of a job that changes its size for a place in its next round, or for news of its hosts. The
// environment names the scheduler and the secret; the process need not be in a round.
func AskSeat(ctx context.Context, env map[string]string, ask wire.Seat) (wire.Seat, error) {
	own := map[string]string{}
	maps.Copy(own, env)
	own["PACELINE_ROLE"] = "server" // which has no rank
	s, _, err := settings.FromEnv(own)
	if err != nil {
		return wire.Seat{}, err
	}
	if err := s.Complete(); err != nil {
		return wire.Seat{}, err
	}
	kinds, err := Transports(&s, zap.NewNop())
	if err != nil {
		return wire.Seat{}, err
	}
	client, err := control.Dial(ctx, control.Config{
		Transport: kinds.Required(), Address: s.Scheduler, Attempt: s.PeerTimeout / 2, Hello: wire.Hello{Role: wire.RoleObserver},
	})
	if err != nil {
		return wire.Seat{}, err
	}
	defer client.Close()
	return client.Seat(ctx, ask)
}
