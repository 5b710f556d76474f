package node

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
	"github.com/paceline/paceline/transport/fabric"
)

// overFabric is the backend over adapters with remote memory access. It has no encryption, so there is none with TLS.
func overFabric(s *settings.Settings, log *zap.Logger) (transport.Transport, error) {
	if s.Transport != "auto" && s.Transport != "fabric" || s.TLSCert != "" {
		return nil, nil
	}
	host, err := s.ListenHost()
	if err != nil {
		return nil, err
	}
	t, err := fabric.New(fabric.Config{
		Secret: s.JobSecret, Provider: s.Fabric, Host: host, Integrity: s.Integrity, PeerTimeout: s.PeerTimeout, Log: log,
	})
	switch {
	case err == nil:
		return t, nil
	case s.Transport == "fabric":
		return nil, fmt.Errorf("PACELINE_TRANSPORT=fabric: %w", err)
	}
	log.Info("no fabric on this machine: hosts are reached by TCP", zap.Error(err))
	return nil, nil
}
