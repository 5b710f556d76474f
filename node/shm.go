package node

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/shm"
)

// overSharedMemory is the backend between processes of one host. It has no encryption, so there is none with TLS.
func overSharedMemory(s *settings.Settings, log *zap.Logger) (transport.Transport, error) {
	if s.Transport != "auto" && s.Transport != "shm" || s.TLSCert != "" {
		return nil, nil
	}
	t, err := shm.New(shm.Config{Secret: s.JobSecret, PeerTimeout: s.PeerTimeout, Ring: int(s.ShmRing), Log: log})
	switch {
	case err == nil:
		return t, nil
	case s.Transport == "shm":
		return nil, fmt.Errorf("PACELINE_TRANSPORT=shm: %w", err)
	}
	log.Info("no shared memory between the processes of this host: they use TCP, too", zap.Error(err))
	return nil, nil
}
