package node

import (
	"go.uber.org/zap"

	"github.com/paceline/paceline/node/settings"
	"github.com/paceline/paceline/transport"
)

// backend makes the transport of one kind as the settings say. It returns nil where the settings exclude the kind, for
// example an unencrypted one where they ask for TLS, or where the machine does not have it.
type backend func(s *settings.Settings, log *zap.Logger) (transport.Transport, error)

// backends are the kinds of transport, in a process's order of preference. The last is the one that every process has.
var backends = []backend{overSharedMemory, overFabric, overTCP}

// Transports makes the transports of a process.
func Transports(s *settings.Settings, log *zap.Logger) (*transport.Set, error) {
	var kinds []transport.Transport
	for _, b := range backends {
		t, err := b(s, log)
		if err != nil {
			return nil, err
		}
		if t != nil {
			kinds = append(kinds, t)
		}
	}
	return transport.NewSet(log, kinds...), nil
}
