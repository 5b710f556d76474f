package node

import (
	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/fabric"
	"github.com/paceline/paceline/transport/shm"
)

// overFabric is the backend over adapters with remote memory access.
func overFabric(s *settings.Settings, _ *shm.Arena, log *zap.Logger) (transport.Transport, error) {
	if !wants(s, fabric.Kind) {
		return nil, nil
	}
	host, err := s.ListenHost()
	if err != nil {
		return nil, err
	}
	t, err := fabric.New(fabric.Config{
		Secret: s.JobSecret, Provider: s.Fabric, Host: host, Integrity: s.Integrity, PeerTimeout: s.PeerTimeout, Log: log,
	})
	return optional(s, log.Info, fabric.Kind, "no fabric on this machine: hosts are reached by TCP", t, err)
}
