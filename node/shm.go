package node

import (
	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/shm"
)

// overSharedMemory is the backend between processes of one host.
func overSharedMemory(s *settings.Settings, arena *shm.Arena, log *zap.Logger) (transport.Transport, error) {
	if !wants(s, shm.Kind) {
		return nil, nil
	}
	t, err := shm.New(shm.Config{Secret: s.JobSecret, PeerTimeout: s.PeerTimeout, Ring: int(s.ShmRing), Arena: arena, Log: log})
	return optional(s, log.Warn, shm.Kind, "no shared memory between the processes of this host: they use TCP, too", t, err)
}
